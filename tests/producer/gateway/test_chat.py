"""Chats by the official client: messages, choices, forms, tools, streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from inferq import StructuredOutputs
from inferq.worker.engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

ANSWER = "Paris is the capital of France."
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

#: Fields that are refused, and the name in the error.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"functions": []}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"store": True}, "store"),
    ({"chat_template": "x"}, "chat_template"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"n": "2"}, "n"),
    ({"temperature": "hot"}, "temperature"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"stream_options": {"fast": True}, "stream": True}, "stream_options.fast"),
]


def test_a_chat_has_openais_shape(openai_client: openai.OpenAI, stand_in_worker: Any) -> None:
    stand_in_worker.say(ANSWER)
    answer = openai_client.chat.completions.create(
        model="stand-in", messages=MESSAGES, max_completion_tokens=50
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.message.tool_calls is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert stand_in_worker.last_request.max_tokens == 50


def test_a_streamed_chat_ends_with_a_reason_then_the_usage(
    openai_client: openai.OpenAI, stand_in_worker: Any
) -> None:
    stand_in_worker.say(ANSWER)
    chunks = list(
        openai_client.chat.completions.create(
            model="stand-in",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    first, *content, end, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in content) == ANSWER
    assert all(chunk.choices[0].finish_reason is None for chunk in (first, *content))
    assert end.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens > 0
    assert {chunk.id for chunk in chunks} == {first.id}
    with openai_client.chat.completions.stream(model="stand-in", messages=MESSAGES) as helper:
        assert helper.get_final_completion().choices[0].message.content == ANSWER


def test_choices_of_a_chat_share_the_prompt_in_the_usage(
    openai_client: openai.OpenAI, stand_in_worker: Any
) -> None:
    one = openai_client.chat.completions.create(model="stand-in", messages=MESSAGES, max_tokens=6)
    two = openai_client.chat.completions.create(
        model="stand-in", messages=MESSAGES, max_tokens=6, n=2
    )
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].message.content != two.choices[1].message.content
    assert one.usage is not None
    assert two.usage is not None
    assert two.usage.prompt_tokens == one.usage.prompt_tokens
    assert two.usage.completion_tokens == 2 * one.usage.completion_tokens


def test_logprobs_of_a_chat_name_tokens_and_their_bytes(
    openai_client: openai.OpenAI, stand_in_worker: Any
) -> None:
    stand_in_worker.say("Ein 🌲.")
    asked: dict[str, Any] = {
        "model": "stand-in", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    [choice] = openai_client.chat.completions.create(**asked).choices
    assert choice.logprobs is not None
    tokens = choice.logprobs.content
    assert tokens is not None
    # the last is the end token, which is no part of the text
    spelled = b"".join(bytes(token.bytes or []) for token in tokens[:-1])
    assert spelled.decode() == choice.message.content == "Ein 🌲."
    for token in tokens:
        assert token.logprob == -0.5
        assert [top.logprob for top in token.top_logprobs] == [-0.5, -1.5]
        assert token.top_logprobs[0].token == token.token
    assert any(token.token.startswith("\\x") for token in tokens)
    streamed = []
    for chunk in openai_client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == tokens


def test_messages_reach_the_models_template(
    http: httpx.Client, tokenizer: Tokenizer, stand_in_worker: Any
) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "again"}]
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Once upon"},
    ]
    asked = {"messages": messages, "max_tokens": 2, "return_token_ids": True}
    asked["continue_final_message"] = True
    answer = http.post("/v1/chat/completions", json=asked).json()
    shown = tokenizer.decode(answer["prompt_token_ids"])
    assert "system\nBe kind." in shown
    assert "user\nHello\nagain" in shown
    assert shown.endswith("assistant\nOnce upon")


def test_what_is_not_supported_is_named(http: httpx.Client) -> None:
    for fields, param in REFUSED:
        answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
        assert answer.status_code == 400, fields
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert param in error["message"]


def test_harmless_fields_pass(openai_client: openai.OpenAI, stand_in_worker: Any) -> None:
    answer = openai_client.chat.completions.create(
        model="stand-in",
        messages=MESSAGES,
        max_tokens=1,
        user="ann",
        metadata={"team": "a"},
        store=False,
        safety_identifier="x",
        prompt_cache_key="y",
        extra_body={"audio": None, "functions": None},
    )
    assert answer.choices[0].finish_reason == "length"


def test_a_form_reaches_the_worker(openai_client: openai.OpenAI, stand_in_worker: Any) -> None:
    stand_in_worker.say('{"city": "Paris"}')
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    answer = openai_client.chat.completions.create(
        model="stand-in",
        messages=MESSAGES,
        response_format={
            "type": "json_schema", "json_schema": {"name": "place", "schema": schema},
        },
    )  # fmt: skip
    assert json.loads(answer.choices[0].message.content or "") == {"city": "Paris"}
    assert stand_in_worker.last_request.structured_outputs == StructuredOutputs(json=schema)


def test_a_form_that_cannot_be_compiled_is_refused_by_its_field(
    openai_client: openai.OpenAI, stand_in_worker: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.chat.completions.create(
            model="stand-in", messages=MESSAGES, extra_body={"guided_regex": "(("}
        )
    assert caught.value.param == "guided_regex"


def test_a_call_of_a_tool_is_found_in_the_text(
    openai_client: openai.OpenAI, stand_in_worker: Any
) -> None:
    stand_in_worker.say(CALL)
    asked: dict[str, Any] = {"model": "stand-in", "messages": MESSAGES, "tools": [WEATHER]}
    [choice] = openai_client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}

    arguments, names, reasons, ids = "", [], [], set()
    for chunk in openai_client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        reasons.append(chunk.choices[0].finish_reason)
        for piece in delta.tool_calls or ():
            assert piece.function is not None
            arguments += piece.function.arguments or ""
            if piece.function.name:
                names.append(piece.function.name)
            ids |= {piece.id} - {None}
    assert (names, json.loads(arguments), reasons[-1]) == (
        ["get_weather"], {"city": "Oslo"}, "tool_calls",
    )  # fmt: skip
    assert len(ids) == 1


def test_a_conversation_with_calls_and_their_results_goes_on(
    openai_client: openai.OpenAI, stand_in_worker: Any
) -> None:
    stand_in_worker.say(CALL, "It rains.")
    first = openai_client.chat.completions.create(
        model="stand-in", messages=MESSAGES, tools=[WEATHER]
    )
    message = first.choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    second = openai_client.chat.completions.create(
        model="stand-in", messages=[*MESSAGES, message, result], tools=[WEATHER]
    )
    assert second.choices[0].message.content == "It rains."
    assert second.choices[0].finish_reason == "stop"
