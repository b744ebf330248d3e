"""Libraries that speak OpenAI's API need nothing special to talk to a gateway."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

ANSWER = "Paris is the capital of France."

LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="stand-in", base_url=sys.argv[1], api_key="none", max_retries=0)
answer = model.invoke("The capital of France?")
print(answer.content)
print(answer.response_metadata["finish_reason"], answer.usage_metadata["output_tokens"] > 0)
chunks = list(model.stream("The capital of France?"))
print("".join(chunk.content for chunk in chunks), len(chunks) > 2)
"""

LITELLM = """
import sys
import litellm

asked = {
    "model": "openai/stand-in",
    "api_base": sys.argv[1],
    "api_key": "none",
    "messages": [{"role": "user", "content": "The capital of France?"}],
}
answer = litellm.completion(**asked)
print(answer.choices[0].message.content)
print(answer.choices[0].finish_reason, answer.usage.completion_tokens > 0)
chunks = list(litellm.completion(**asked, stream=True))
print("".join(chunk.choices[0].delta.content or "" for chunk in chunks), len(chunks) > 2)
"""


@pytest.mark.parametrize("script", [LANGCHAIN, LITELLM], ids=["langchain", "litellm"])
def test_a_chat_and_a_stream(gateway: Any, stand_in_worker: Any, script: str) -> None:
    stand_in_worker.say(ANSWER)
    # In a process of its own: importing them takes seconds, and warns of their dependencies.
    run = subprocess.run(
        [sys.executable, "-c", script, f"{gateway.url}/v1"],
        # Keeps litellm from asking the network what models cost.
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [ANSWER, "stop True", f"{ANSWER} True"]


LANGCHAIN_TOOLS = """
import sys
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

@tool
def weather(city: str) -> str:
    "The weather of a city."
    return "rain"

class City(BaseModel):
    name: str

model = ChatOpenAI(model="stand-in", base_url=sys.argv[1], api_key="none", max_retries=0)
(call,) = model.bind_tools([weather]).invoke("The weather in Rome?").tool_calls
print(call["name"], call["args"])
merged = None
for chunk in model.bind_tools([weather]).stream("The weather in Rome?"):
    merged = chunk if merged is None else merged + chunk
print(merged.tool_calls[0]["args"])
print(model.with_structured_output(City).invoke("A city?"))
"""


def test_langchain_s_tools_and_structured_output(gateway: Any, stand_in_worker: Any) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    stand_in_worker.say(call, call, '{"name": "Rome"}')
    run = subprocess.run(
        [sys.executable, "-c", LANGCHAIN_TOOLS, f"{gateway.url}/v1"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        "weather {'city': 'Rome'}",
        "{'city': 'Rome'}",
        "name='Rome'",
    ]
