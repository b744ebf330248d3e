"""Tools through a gateway with OpenAI's client, before an engine that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from inferq.protocol.params import SamplingParams

pytestmark = pytest.mark.model

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
)
ASKED = {"model": "stand-in", "messages": [{"role": "user", "content": "The weather?"}]}


def form(worker: Any) -> Any:
    params: SamplingParams = worker.last_request
    return params.structured_outputs


def test_calls_in_an_answer_have_openai_s_shape(
    openai_client: openai.OpenAI, stand_in_worker: Any
) -> None:
    stand_in_worker.say(CALLS)
    answer = openai_client.chat.completions.create(**ASKED, tools=[WEATHER])  # type: ignore[call-overload]
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["weather", "weather"]
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Zürich", "Łódź"]
    assert len({call.id for call in calls}) == 2
    assert "weather" in form(stand_in_worker).grammar


def test_a_stream_of_calls_comes_to_the_same(
    openai_client: openai.OpenAI, stand_in_worker: Any
) -> None:
    stand_in_worker.say(CALLS)
    with openai_client.chat.completions.stream(**ASKED, tools=[WEATHER]) as stream:
        events = list(stream)
        answer = stream.get_final_completion()
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Zürich", "Łódź"]
    pieces = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > len(calls)


def test_a_named_function_is_called_with_what_its_schema_lets_through(
    openai_client: openai.OpenAI, stand_in_worker: Any
) -> None:
    stand_in_worker.say('{"city": "Paris"}')
    answer = openai_client.chat.completions.create(  # type: ignore[call-overload]
        **ASKED, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}}
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    assert json.loads(form(stand_in_worker).json)["required"] == ["city"]


def test_a_cut_stream_of_calls_goes_on_at_another_gateway_with_the_same_ids(
    http: httpx.Client,
    gateway: Any,
    start_gateway: Callable[..., Any],
    stand_in_worker: Any,
) -> None:
    stand_in_worker.say(CALLS)
    body = {**ASKED, "tools": [WEATHER], "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        job_id = response.headers["X-Inferq-Job-Id"]
        whole = _events(response)
    with httpx.Client(base_url=start_gateway().url, timeout=60) as other:
        for cut in (1, len(whole) // 2, len(whole) - 2):
            last_id = whole[cut - 1][0]
            with other.stream(
                "GET", f"/v1/streams/{job_id}", headers={"Last-Event-ID": last_id}
            ) as response:
                rest = _events(response)
            assert whole[:cut] + rest == whole
    assert [name for event in whole for name in _names(event[1])] == ["weather", "weather"]


def test_a_turn_with_calls_and_their_answers_is_understood(
    openai_client: openai.OpenAI, stand_in_worker: Any
) -> None:
    stand_in_worker.say("It rains.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    answer = openai_client.chat.completions.create(  # type: ignore[call-overload]
        model="stand-in",
        tools=[WEATHER],
        messages=[
            {"role": "user", "content": "The weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
    )
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_bare_calls_are_found_where_the_gateway_says_so(
    start_gateway: Callable[..., Any], stand_in_worker: Any
) -> None:
    stand_in_worker.say('{"name": "weather", "parameters": {"city": "Rome"}}')
    url = f"{start_gateway(tool_format='json').url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(**ASKED, tools=[WEATHER])  # type: ignore[call-overload]
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.arguments == '{"city": "Rome"}'


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tools": []}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tools": [WEATHER], "use_beam_search": True, "n": 2}, "tools"),
        # Found by the worker, and named as the client knows it.
        ({"guided_regex": "(?=a)"}, "guided_regex"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]},
            "tools",
        ),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_served_is_a_400_that_names_it(
    openai_client: openai.OpenAI, changes: dict[str, Any], field: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(  # type: ignore[call-overload]
            model="stand-in",
            messages=ASKED["messages"],
            stream=stream,
            extra_body=changes,
        )
    assert caught.value.param == field


def _events(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """The ids and chunks of a stream of server-sent events, up to `[DONE]`."""
    assert response.status_code == 200
    events, event_id = [], ""
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data" and value != "[DONE]":
            events.append((event_id, json.loads(value)))
    assert value == "[DONE]" or line == ""
    return events


def _names(chunk: dict[str, Any]) -> list[str]:
    return [
        call["function"]["name"]
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
        if "name" in call["function"]
    ]


def test_an_answer_that_was_cut_anywhere_can_be_sent_back(
    http: httpx.Client, stand_in_worker: Any
) -> None:
    stand_in_worker.say(CALLS)
    stand_in_worker.slow_down(0.0)
    asked = {**ASKED, "tools": [WEATHER], "max_tokens": 1}
    cut_arguments = set()
    while True:
        answer = http.post("/v1/chat/completions", json=asked).json()
        [choice] = answer["choices"]
        for call in choice["message"].get("tool_calls") or []:
            cut_arguments.add(call["function"]["arguments"])
        turns = [*ASKED["messages"], choice["message"], {"role": "user", "content": "Go on."}]
        next_turn = {**asked, "messages": turns, "max_tokens": 1}
        again = http.post("/v1/chat/completions", json=next_turn)
        assert again.status_code == 200, (asked["max_tokens"], again.text)
        if choice["finish_reason"] != "length":
            break
        asked["max_tokens"] += 1
    assert '{"city": "' in cut_arguments
