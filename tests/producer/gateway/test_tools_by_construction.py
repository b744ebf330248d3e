"""A small real model, which was taught no tools, calls them rightly: it can write nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import redis

from inferq.protocol.keys import QueueKeys

#: A model's load, on a machine that has other things to do.
READY_TIMEOUT_S = 120.0

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock"}},
]


@pytest.fixture(scope="module")
def worker_queue(valkey_url: str, smollm2: Path) -> Iterator[str]:
    """A queue that a real worker serves."""
    queue = "test-tools-by-construction"
    command = [sys.executable, "-m", "inferq", "worker", "--model", str(smollm2), "--queue", queue]
    limits = ["--max-model-len", "1024", "--num-kv-blocks", "512", "--redis-url", valkey_url]
    with subprocess.Popen([*command, *limits]) as worker:
        deadline = time.monotonic() + READY_TIMEOUT_S
        with redis.Redis.from_url(valkey_url) as client:
            while not client.hlen(QueueKeys(queue).workers):
                assert worker.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield queue
        worker.terminate()


@pytest.fixture
def ask(worker_queue: str, start_gateway: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Ask through a gateway that expects calls in a format; sampled, always the same."""
    clients: list[openai.OpenAI] = []

    def send(tool_format: str = "hermes", **asked: Any) -> Any:
        url = start_gateway(queues=(worker_queue,), tool_format=tool_format).url
        clients.append(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
        return clients[-1].chat.completions.create(
            model=clients[-1].models.list().data[0].id,
            messages=[{"role": "user", "content": "What will the weather in Rome be?"}],
            max_tokens=200,
            seed=7,
            **asked,
        )

    yield send
    for client in clients:
        client.close()


def check(calls: list[Any]) -> None:
    assert calls
    for call in calls:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            jsonschema.validate(arguments, SCHEMA)
        else:
            assert (call.function.name, arguments) == ("clock", {})


def test_a_named_function_is_called(ask: Callable[..., Any]) -> None:
    answer = ask(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    check(answer.choices[0].message.tool_calls)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
def test_some_function_is_called_where_one_must_be(
    ask: Callable[..., Any], tool_format: str
) -> None:
    answer = ask(tool_format, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=2)
    for choice in answer.choices:
        check(choice.message.tool_calls)
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")


def test_an_answer_has_the_form_asked_for_even_where_tools_might_be_called(
    ask: Callable[..., Any],
) -> None:
    described = {"name": "weather", "schema": SCHEMA, "strict": True}
    answer = ask(tools=TOOLS[1:], response_format={"type": "json_schema", "json_schema": described})
    message = answer.choices[0].message
    if message.tool_calls:
        check(message.tool_calls)
    else:
        jsonschema.validate(json.loads(message.content), SCHEMA)
