"""Conversations on the wire: round trips, the plain form, every bad value."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq.protocol import prompts
from inferq.protocol.digest import content_digest
from inferq.protocol.errors import DecodeError, InvalidRequestError
from inferq.protocol.keys import new_job_id
from inferq.protocol.messages import Job, Task
from inferq.protocol.params import SamplingParams
from inferq.protocol.prompts import ChatMessage, ChatPrompt, TextPrompt, tool_arguments

USER = ChatMessage("user", "What is the weather in Prague?")
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Prague"}'},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TURNS = (
    USER,
    ChatMessage("assistant", None, {"tool_calls": [CALL], "reasoning_content": "Ask."}),
    ChatMessage("tool", "Sunny", {"tool_call_id": "call_1", "name": "weather"}),
)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)
conversations = st.builds(
    ChatPrompt,
    st.just(TURNS) | st.just((USER,)),
    st.sampled_from([(), (TOOL,), (TOOL, TOOL)]),
    st.dictionaries(
        names.filter(lambda name: name not in prompts.RESERVED_TEMPLATE_NAMES),
        st.booleans() | names | st.lists(st.integers(0, 9), max_size=2),
        max_size=3,
    ),
    st.just(False),
    st.booleans(),
)


def job(prompt: prompts.Prompt, **options: Any) -> Job:
    return Job(new_job_id(), prompt, SamplingParams(), **options)


@given(conversations)
def test_a_conversation_comes_back_as_it_was(prompt: ChatPrompt) -> None:
    sent = job(prompt)
    assert Job.decode(sent.encode()) == sent


def test_a_plain_conversation_has_the_form_that_it_always_had() -> None:
    wire = msgpack.unpackb(job(ChatPrompt((USER,))).encode())
    assert wire["m"] == [["user", USER.content]]
    assert not {"tl", "ck", "cg", "k", "rp", "as"} & set(wire)


def test_a_text_without_special_tokens_comes_back_as_it_was() -> None:
    sent = job(TextPrompt("x", add_special_tokens=False))
    assert Job.decode(sent.encode()) == sent


@pytest.mark.parametrize(
    ("role", "content", "extra", "field"),
    [
        ("user", None, {}, "messages.content"),
        ("assistant", None, {"tool_calls": []}, "messages.content"),
        ("user", 5, {}, "messages.content"),
        ("user", "x", {"colour": "red"}, "messages.colour"),
        ("user", "x", {"name": ""}, "messages.name"),
        ("user", "x", {"name": 5}, "messages.name"),
        ("user", "x", {"name": "n" * 257}, "messages.name"),
        ("tool", "x", {"tool_call_id": ["a"]}, "messages.tool_call_id"),
        ("assistant", "x", {"reasoning_content": {}}, "messages.reasoning_content"),
        ("assistant", "x", {"tool_calls": "f()"}, "messages.tool_calls"),
        ("assistant", "x", {"tool_calls": ["f()"]}, "messages.tool_calls[0]"),
        ("assistant", "x", {"tool_calls": [{"function": "f"}]}, "messages.tool_calls[0]"),
        ("assistant", "x", {"tool_calls": [CALL | {"type": "custom"}]}, "messages.tool_calls[0]"),
        ("assistant", "x", {"tool_calls": [CALL, CALL | {"id": 5}]}, "messages.tool_calls[1].id"),
        ("assistant", "x", {"tool_calls": [CALL] * 1025}, "messages.tool_calls"),
        ("user", "x", ["name"], "messages"),
        ("user", "x", {"reasoning_content": "x" * (4 * 2**20)}, "messages"),
    ],
)
def test_a_bad_message_is_refused_with_the_field_named(
    role: str, content: Any, extra: Any, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatMessage(role, content, extra)
    assert caught.value.field == field


@pytest.mark.parametrize("arguments", [5, None, {"city": "Prague"}])
def test_arguments_that_are_no_text_are_refused(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(InvalidRequestError) as caught:
        ChatMessage("assistant", None, {"tool_calls": [call]})
    assert caught.value.field == "messages.tool_calls[0].function.arguments"


@pytest.mark.parametrize("arguments", ["Prague", "[1]", '{"a": NaN}', '{"a"', "[" * 10**5])
def test_arguments_that_spell_no_object_travel_as_the_text_they_are(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    sent = job(ChatPrompt((ChatMessage("assistant", None, {"tool_calls": [call]}),)))
    assert Job.decode(sent.encode()) == sent
    assert tool_arguments(call) == arguments


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"a": 1}', {"a": 1}), ("", {}), (" ", {}), ("{}", {})],
)
def test_arguments_are_read_as_an_object(arguments: str, read: dict[str, Any]) -> None:
    assert tool_arguments({"function": {"name": "f", "arguments": arguments}}) == read
    assert tool_arguments({"function": {"name": "f"}}) == {}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": ("weather",)}, "tools"),
        ({"tools": ({"type": "function"},)}, "tools"),
        ({"tools": (TOOL | {"type": "web_search"},)}, "tools"),
        ({"tools": ({"type": "function", "function": {}},)}, "tools.function.name"),
        ({"tools": (TOOL,) * 1025}, "tools"),
        ({"tools": (TOOL | {"x": "y" * 2**19},) * 3}, "tools"),
        ({"template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
        ({"template_kwargs": {"x": b"y"}}, "chat_template_kwargs"),
        ({"template_kwargs": {"x": "y" * 2**16}}, "chat_template_kwargs"),
        ({"template_kwargs": {str(i): i for i in range(65)}}, "chat_template_kwargs"),
        ({"template_kwargs": "enable_thinking"}, "chat_template_kwargs"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_bad_conversation_is_refused_with_the_field_named(
    options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatPrompt((USER,), **options)
    assert caught.value.field == field


def test_a_message_without_content_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequestError, match="no content") as caught:
        ChatPrompt(TURNS[:2], add_generation_prompt=False, continue_final_message=True)
    assert caught.value.field == "continue_final_message"


def test_all_that_messages_have_counts_against_the_limit() -> None:
    half = ChatMessage("user", "x" * (2 * 2**20))
    calls = [CALL | {"more": "y" * (3 * 2**20)}]
    with pytest.raises(InvalidRequestError) as caught:
        ChatPrompt((half, ChatMessage("assistant", None, {"tool_calls": calls})))
    assert (caught.value.field, caught.value.limit) == ("messages", str(4 * 2**20))


@pytest.mark.parametrize(
    "change",
    [
        {"m": [["user"]]},
        {"m": [["user", "x", {}, {}]]},
        {"m": ["user"]},
        {"m": "user"},
        {"cg": [True]},
        {"cg": True},
        {"tl": {}},
        {"ck": []},
        {"p": "x"},
        {"rp": 1},
        {"k": 5},
    ],
    ids=str,
)
def test_a_job_with_a_damaged_conversation_is_no_job(change: dict[str, Any]) -> None:
    wire = msgpack.unpackb(job(ChatPrompt((USER,))).encode()) | change
    with pytest.raises(DecodeError):
        Job.decode(msgpack.packb(wire))


def test_a_task_that_nobody_knows_is_a_bad_request() -> None:
    wire = msgpack.unpackb(job(TextPrompt("x")).encode()) | {"k": "paint"}
    with pytest.raises(InvalidRequestError) as caught:
        Job.decode(msgpack.packb(wire))
    assert caught.value.field == "task"


def test_a_job_for_the_tokens_of_its_prompt_comes_back_as_it_was() -> None:
    sent = job(TextPrompt("x"), task=Task.TOKENIZE, return_prompt_token_ids=True)
    assert Job.decode(sent.encode()) == sent


def test_a_digest_covers_all_that_is_asked_for() -> None:
    def digest(prompt: prompts.Prompt, **options: Any) -> str:
        return content_digest(prompt, SamplingParams(), None, {}, **options)

    reordered = TOOL | {"function": dict(reversed(TOOL["function"].items()))}
    asked = [
        digest(ChatPrompt((USER,))),
        digest(ChatPrompt((USER,), (TOOL,))),
        digest(ChatPrompt((USER,), (reordered,))),
        digest(ChatPrompt((USER,), template_kwargs={"enable_thinking": True})),
        digest(ChatPrompt((USER,), template_kwargs={"enable_thinking": False})),
        digest(ChatPrompt((USER,), add_generation_prompt=False)),
        digest(ChatPrompt((USER,), add_generation_prompt=False, continue_final_message=True)),
        digest(ChatPrompt((ChatMessage("user", USER.content, {"name": "Ada"}),))),
        digest(ChatPrompt((USER,)), task=Task.TOKENIZE),
        digest(ChatPrompt((USER,)), return_prompt_token_ids=True),
        digest(TextPrompt("x")),
        digest(TextPrompt("x", add_special_tokens=False)),
    ]
    assert len(set(asked)) == len(asked)
