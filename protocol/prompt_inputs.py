"""Prompts of the plain maps and lists that callers of the SDK and of the engine give."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, TypedDict, Unpack

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.prompts import MESSAGE_FIELDS, ChatMessage, ChatPrompt, TokenPrompt

#: One message of a chat: a map with `role`, `content` and perhaps `name`, `tool_call_id`,
#: `tool_calls` or `reasoning_content`; or the message itself.
ChatInput = Mapping[str, Any] | ChatMessage


class ChatOptions(TypedDict, total=False):
    """How token ids are made of chat messages.

    - `tools`: functions that the model may call, as OpenAI's objects.
    - `chat_template_kwargs`: more names for the model's chat template.
    - `add_generation_prompt`: whether the template begins the assistant's answer; true by default.
    - `continue_final_message`: leave the last message open, so that the output goes on with it.
    """

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


def chat_prompt(messages: Sequence[Any], **options: Unpack[ChatOptions]) -> ChatPrompt:
    """Return a conversation, checked; raises `InvalidRequestError`."""
    check_names(options, ChatOptions.__optional_keys__)
    tools = options.get("tools") or ()
    check_list("messages", messages)
    check_list("tools", tools)
    return ChatPrompt(
        tuple(_chat_message(message) for message in messages),
        tools=tuple(tools),
        template_kwargs=options.get("chat_template_kwargs") or {},
        add_generation_prompt=options.get("add_generation_prompt", True),
        continue_final_message=options.get("continue_final_message", False),
    )


def token_prompt(token_ids: Sequence[Any]) -> TokenPrompt:
    """Return a prompt of token ids, checked; numpy's integers are taken as well."""
    return TokenPrompt(tuple(_token_id(item) for item in token_ids))


def check_names(options: Mapping[str, object], known: frozenset[str]) -> None:
    """Raise `TypeError` for an argument that there is not, as a call does."""
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"there is no argument {unknown[0]!r}")


def check_list(field: str, value: object) -> None:
    """Raise `InvalidRequestError` unless the value is a sequence, and no text."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        raise InvalidRequestError(f"must be a list, not {type(value).__name__}", field=field)


def _token_id(item: object) -> Any:
    """Return a plain int for other whole numbers; TokenPrompt checks every id."""
    if type(item) is int or isinstance(item, bool) or not isinstance(item, SupportsIndex):
        return item
    return operator.index(item)


def _chat_message(message: Any) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"every message must be a map with role and content, not {type(message).__name__}",
            field="messages",
        )
    known = ("role", "content", *MESSAGE_FIELDS)
    unknown = sorted(str(key) for key in message if key not in known)
    if unknown:
        raise InvalidRequestError(
            f"is not supported: a message has {', '.join(known)}", field=f"messages.{unknown[0]}"
        )
    extra = {name: message[name] for name in MESSAGE_FIELDS if message.get(name) is not None}
    for name in ("role", "content"):
        if name not in message and not (name == "content" and "tool_calls" in extra):
            raise InvalidRequestError("is missing", field=f"messages.{name}")
    return ChatMessage(message["role"], message.get("content"), extra)
