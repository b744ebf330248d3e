"""The gateway before a worker with the small real model: the same answers as by the SDK."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import redis

from inferq import Client, SamplingParams
from inferq.protocol.keys import QueueKeys

pytestmark = pytest.mark.model

READY_TIMEOUT_S = 120.0
PROMPT = "The capital of France is"
#: What no two samples say alike.
STORY: Any = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France? Be brief."}]


@pytest.fixture(scope="module")
def real_queue(valkey_url: str, smollm2: Path, tmp_path_factory: Any) -> Iterator[str]:
    """A queue with a worker of the real model, as its users start it."""
    queue, log = "gateway-real", tmp_path_factory.mktemp("real") / "worker.log"
    options = {
        "model": smollm2, "redis-url": valkey_url, "queue": queue, "worker-name": "real",
        "max-model-len": 1024, "num-kv-blocks": 512,
    }  # fmt: skip
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with log.open("wb") as stream:
        command = [sys.executable, "-m", "inferq", "worker", *arguments]
        process = subprocess.Popen(command, stderr=stream)
    try:
        with redis.Redis.from_url(valkey_url) as server:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while not server.hexists(QueueKeys(queue).workers, "real"):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield queue
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def client(real_queue: str, start_gateway: Callable[..., Any]) -> Iterator[openai.OpenAI]:
    gateway = start_gateway(queues=(real_queue,))
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    [served] = client.models.list().data
    return served.id


@pytest.fixture
def sdk(real_queue: str, valkey_url: str) -> Iterator[Client]:
    with Client(valkey_url, real_queue) as made:
        yield made


def test_a_completion_is_what_the_sdk_returns(
    client: openai.OpenAI, model: str, sdk: Client
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=3)
    expected = sdk.submit(PROMPT, params).result()
    asked: dict[str, Any] = {
        "model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 3,
    }  # fmt: skip
    answer = client.completions.create(**asked)
    [choice] = answer.choices
    assert choice.text == expected.text
    assert choice.logprobs is not None
    assert expected.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(
        [entry.logprob for entry in expected.logprobs], abs=1e-4
    )
    assert "".join(choice.logprobs.tokens or ()) == expected.text
    for shown, entry in zip(choice.logprobs.top_logprobs or (), expected.logprobs, strict=True):
        assert sorted(shown.values()) == pytest.approx(
            sorted(value for _, value in entry.top), abs=1e-4
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    streamed = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected.text


def test_a_chat_is_what_the_sdk_returns_and_stops_where_it_is_told(
    client: openai.OpenAI, model: str, sdk: Client
) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0)
    expected = sdk.submit(messages=MESSAGES, params=params).result()
    asked: dict[str, Any] = {
        "model": model, "messages": MESSAGES, "max_tokens": 40, "temperature": 0,
    }  # fmt: skip
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.message.content == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert "Paris" in expected.text
    [stopped] = client.chat.completions.create(**asked, stop="Paris").choices
    assert stopped.message.content == expected.text.partition("Paris")[0]
    assert stopped.finish_reason == "stop"


def test_a_seed_fixes_every_choice_also_in_a_stream(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {
        "model": model, "messages": STORY, "max_tokens": 16, "n": 2, "seed": 11,
        "temperature": 1.0,
    }  # fmt: skip
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    texts = {choice.index: choice.message.content for choice in first.choices}
    assert texts == {choice.index: choice.message.content for choice in second.choices}
    assert texts[0] != texts[1]
    streamed = dict.fromkeys(texts, "")
    for chunk in client.chat.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == 16 * (
        (second.usage.prompt_tokens - 1) // 16
    )


def test_a_form_is_kept(client: openai.OpenAI, model: str) -> None:
    [choice] = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        max_tokens=20,
        seed=1,
        extra_body={"guided_choice": ["Paris", "Rome"]},
    ).choices
    assert choice.message.content in ("Paris", "Rome")
