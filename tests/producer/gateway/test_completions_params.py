"""Bodies become sampling parameters, jobs and prompts; what cannot is refused by its own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inferq import InvalidRequestError, SamplingParams, StructuredOutputs
from inferq.producer.gateway.requests.chat import ask_chat
from inferq.producer.gateway.requests.completion import ask_completion
from inferq.producer.gateway.requests.schemas import ChatBody, CompletionBody
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.params import MAX_TOKENS_LIMIT
from inferq.protocol.prompts import ChatMessage

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [{"role": "user", "content": "Hello"}]


def completion(**fields: Any) -> SamplingParams:
    body = CompletionBody.model_validate({"prompt": "Hello", **fields})
    return ask_completion(body, "m", GatewaySettings(max_prompts=10)).params


def chat(settings: GatewaySettings | None = None, **fields: Any) -> SamplingParams:
    body = ChatBody.model_validate({"messages": MESSAGES, **fields})
    return ask_chat(body, "m", settings or GatewaySettings()).params


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"max_tokens": 16}),
        ({"max_tokens": None}, {"max_tokens": 16}),
        ({"max_tokens": 5, "min_tokens": 2, "ignore_eos": True}, {}),
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1}, {}),
        ({"n": 3, "best_of": 5}, {}),
        ({"seed": 7, "stop": ["a", "b"], "stop_token_ids": [1, 2]}, {}),
        ({"stop": "end", "include_stop_str_in_output": True}, {}),
        ({"presence_penalty": 1, "frequency_penalty": -1.5, "repetition_penalty": 1.2}, {}),
        ({"logit_bias": {"15": -100, "3": 2.5}}, {"logit_bias": {15: -100, 3: 2.5}}),
        ({"logprobs": 5}, {}),
        ({"logprobs": 2, "echo": True}, {"logprobs": 2, "prompt_logprobs": 2}),
        ({"logprobs": 2, "echo": True, "prompt_logprobs": 4}, {}),
        ({"echo": True, "max_tokens": 0}, {"max_tokens": 1}),
        ({"bad_words": ["no"], "allowed_token_ids": [1, 2, 3]}, {}),
        ({"truncate_prompt_tokens": 100, "skip_special_tokens": False}, {}),
        ({"spaces_between_special_tokens": False}, {}),
        ({"use_beam_search": True, "n": 4}, {"beam_width": 4, "n": 4}),
        (
            {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0.5},
            {"beam_width": 4, "n": 2, "length_penalty": 0.5, "best_of": None},
        ),
        ({"use_beam_search": True, "early_stopping": "never"}, {"beam_width": 1}),
        ({"length_penalty": 1.0, "early_stopping": False, "use_beam_search": False}, {}),
        (
            {"guided_regex": "a+"},
            {"structured_outputs": StructuredOutputs(regex="a+")},
        ),
        (
            {"structured_outputs": {"choice": ["yes", "no"]}},
            {"structured_outputs": StructuredOutputs(choice=["yes", "no"])},
        ),
        (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": StructuredOutputs(json_object=True)},
        ),
    ],
)
def test_the_fields_of_a_completion_become_sampling_parameters(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    names = SamplingParams.__dataclass_fields__
    same = {name: value for name, value in fields.items() if name in names and value is not None}
    assert completion(**fields) == SamplingParams(**{**same, **expected})


def test_what_is_not_given_is_left_to_the_model() -> None:
    params = completion(temperature=None)
    assert not params.is_given("temperature")
    assert completion(temperature=1.0).is_given("temperature")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"max_tokens": None}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"max_completion_tokens": 6, "max_tokens": 6}, {"max_tokens": 6}),
        ({"logprobs": True}, {"logprobs": 0, "max_tokens": None}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3, "max_tokens": None}),
        ({"logprobs": False, "top_logprobs": 0}, {"max_tokens": None}),
        ({"use_beam_search": True, "n": 2}, {"beam_width": 2, "n": 2, "max_tokens": None}),
        ({"guided_choice": ["a"], "max_tokens": 1},
         {"max_tokens": 1, "structured_outputs": StructuredOutputs(choice=["a"])}),
    ],
)  # fmt: skip
def test_the_fields_of_a_chat_become_sampling_parameters(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert chat(**fields) == SamplingParams(**expected)


def test_a_chat_without_a_limit_gets_the_gateways() -> None:
    assert chat(GatewaySettings(default_max_tokens=99)).max_tokens == 99
    assert chat(GatewaySettings(default_max_tokens=99), max_tokens=3).max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 100_000}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": "x" * 2**20}, "stop"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"use_beam_search": True, "n": 1000}, "n"),
        ({"use_beam_search": True, "best_of": 1000}, "best_of"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 11}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
    ],
)
def test_an_impossible_completion_is_refused_by_its_field(
    fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 1, "max_tokens": 2}, "max_tokens"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 1}]}, "messages[1].content"),
        ({"messages": [{**MESSAGES[0], "colour": "red"}]}, "messages[0].colour"),
        ({"messages": [{**MESSAGES[0], "audio": {"id": "x"}}]}, "messages[0].audio"),
        ({"messages": [{**MESSAGES[0], "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": MESSAGES * 5000}, "messages"),
    ],
)
def test_an_impossible_chat_is_refused_by_its_field(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(**fields)
    assert caught.value.field == name


def test_messages_keep_what_templates_know_and_lose_what_is_empty() -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "name": "Ann", "content": [
            {"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None,
         "annotations": [], "audio": None, "function_call": None},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]  # fmt: skip
    body = ChatBody.model_validate({"messages": messages})
    [prompt] = ask_chat(body, "m", GatewaySettings()).prompts
    assert prompt["messages"] == [
        ChatMessage("system", "Be kind."),
        ChatMessage("user", "one\ntwo", {"name": "Ann"}),
        ChatMessage("assistant", "", {"tool_calls": [CALL]}),
        ChatMessage("tool", "3", {"tool_call_id": "c1"}),
    ]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"name": 5}, "name"),
        ({"content": "\ud800"}, "content"),
        ({"reasoning_content": 5}, "reasoning_content"),
        ({"tool_call_id": "c" * 257, "role": "tool"}, "tool_call_id"),
        ({"tool_calls": "f()"}, "tool_calls"),
        ({"tool_calls": [CALL, "f()"]}, "tool_calls[1]"),
        ({"tool_calls": [CALL, {**CALL, "id": 5}]}, "tool_calls[1].id"),
        ({"tool_calls": [CALL, {"function": {}}]}, "tool_calls[1].function.name"),
        (
            {"tool_calls": [CALL, {"function": {"name": "f", "arguments": {}}}]},
            "tool_calls[1].function.arguments",
        ),
    ],
)
def test_what_is_wrong_in_a_message_is_named_with_its_place(
    fields: dict[str, Any], place: str
) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "x", **fields}]
    with pytest.raises(InvalidRequestError) as caught:
        ask_chat(ChatBody.model_construct(messages=messages), "m", GatewaySettings())
    assert caught.value.field == f"messages[1].{place}"
    assert str(caught.value).startswith(f"messages[1].{place}: ")


@pytest.mark.parametrize("value", [-1, 99])
@pytest.mark.parametrize(
    ("ask", "field", "more"),
    [
        (completion, "logprobs", {}),
        (completion, "logprobs", {"echo": True}),
        (completion, "prompt_logprobs", {}),
        (chat, "prompt_logprobs", {}),
        (chat, "top_logprobs", {"logprobs": True}),
    ],
)
def test_a_range_is_the_same_below_and_above(
    ask: Callable[..., Any], field: str, more: dict[str, Any], value: int
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask(**more, **{field: value})
    assert str(caught.value) == f"{field}: {value} is not in [0, 20]"


@pytest.mark.parametrize("value", [-1, MAX_TOKENS_LIMIT + 1])
@pytest.mark.parametrize(
    ("ask", "field", "more", "least"),
    [
        (completion, "max_tokens", {}, 1),
        (completion, "max_tokens", {"echo": True}, 0),
        (chat, "max_tokens", {}, 1),
        (chat, "max_completion_tokens", {}, 1),
    ],
)
def test_a_range_of_tokens_begins_with_what_is_taken(
    ask: Callable[..., Any], field: str, more: dict[str, Any], least: int, value: int
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ask(**more, **{field: value})
    assert str(caught.value) == f"{field}: {value} is not in [{least}, {MAX_TOKENS_LIMIT}]"


@pytest.mark.parametrize("ask", [completion, chat])
def test_an_empty_list_is_none_unless_it_leaves_nothing_to_choose(ask: Callable[..., Any]) -> None:
    neutral: dict[str, Any] = {"stop": [], "stop_token_ids": [], "bad_words": [], "logit_bias": {}}
    assert ask(**neutral) == ask()
    for field in ("allowed_token_ids", "guided_choice"):
        with pytest.raises(InvalidRequestError, match="is empty") as caught:
            ask(**{field: []})
        assert caught.value.field == field


def test_a_final_message_that_is_continued_begins_no_answer() -> None:
    body = ChatBody.model_validate(
        {
            "messages": [{"role": "assistant", "content": "Once"}],
            "continue_final_message": True,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    [prompt] = ask_chat(body, "m", GatewaySettings()).prompts
    assert prompt["continue_final_message"] is True
    assert prompt["add_generation_prompt"] is False
    assert prompt["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("ask", "fields", "message"),
    [
        (
            completion,
            {"n": 2, "temperature": 0},
            "n: greedy sampling has one output only; raise the temperature or set use_beam_search",
        ),
        (
            chat,
            {"n": 2, "temperature": 0},
            "n: greedy sampling has one output only; raise the temperature or set use_beam_search",
        ),
        (
            completion,
            {"use_beam_search": True, "n": 4, "best_of": 2},
            "n: 4 is more than best_of (2)",
        ),
        (
            chat,
            {"max_completion_tokens": 5, "min_tokens": 6},
            "min_tokens: 6 is more than max_completion_tokens (5)",
        ),
        (
            chat,
            {"use_beam_search": True, "logprobs": True},
            "logprobs: does not go with beam search",
        ),
    ],
)
def test_an_error_speaks_of_the_bodys_fields(
    ask: Callable[..., SamplingParams], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        ask(**fields)
    assert str(raised.value) == message
