"""What a producer may give as a prompt: text, token ids or chat messages, with their options."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, SupportsIndex, TypedDict, Unpack

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.json_values import encoded_size
from inferq.protocol.prompts import (
    MESSAGE_FIELDS,
    ChatMessage,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)

#: One message of a chat: a map with `role`, `content` and perhaps `name`, `tool_call_id`,
#: `tool_calls` or `reasoning_content`; or the message itself.
ChatInput = Mapping[str, Any] | ChatMessage
#: What `submit` takes: text, token ids, or the messages of a chat.
PromptInput = str | Sequence[int] | Sequence[ChatInput]


class PromptOptions(TypedDict, total=False):
    """How token ids are made of a prompt; all but the first are for chat messages.

    - `add_special_tokens`: whether a text gets the model's special tokens around it.
    - `tools`: functions that the model may call, as OpenAI's objects.
    - `chat_template_kwargs`: more names for the model's chat template.
    - `add_generation_prompt`: whether the template begins the assistant's answer; true by default.
    - `continue_final_message`: leave the last message open, so that the output goes on with it.
    """

    add_special_tokens: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


#: Tokens that a tokenizer may add to a text (begin and end marks).
TEXT_MARGIN: Final = 8
#: Tokens that a chat template adds per message (marks of its role, its begin and its end), and
#: once (a default system prompt, some 30 tokens in common ones, and the start of the answer).
#: A bound for choosing a worker only: the worker counts the tokens themselves.
MESSAGE_MARGIN: Final = 16
TEMPLATE_MARGIN: Final = 112
_CHAT_OPTIONS: Final = (
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
#: What options are when they ask for nothing; `tools` and the like may be empty too.
_NEUTRAL: Final[Mapping[str, object]] = MappingProxyType(
    {"add_special_tokens": True, "add_generation_prompt": True, "continue_final_message": False}
)


def to_prompt(
    prompt: PromptInput | None,
    messages: Sequence[ChatInput] | None,
    **options: Unpack[PromptOptions],
) -> Prompt:
    """Return the prompt's message for text, token ids or chat messages, whichever is given."""
    unknown = sorted(set(options) - PromptOptions.__optional_keys__)
    if unknown:
        raise TypeError(f"there is no argument {unknown[0]!r}")
    if messages is not None:
        if prompt is not None:
            raise InvalidRequestError("goes not together with messages", field="prompt")
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise InvalidRequestError("must be a list of messages", field="messages")
        return _chat_prompt(messages, options)
    if prompt is None:
        raise InvalidRequestError("is missing: give text, token ids or messages", field="prompt")
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        raise InvalidRequestError("must be text, not bytes: decode it first", field="prompt")
    if not isinstance(prompt, Sequence):
        raise InvalidRequestError(
            f"must be text, token ids or chat messages, not {type(prompt).__name__}",
            field="prompt",
        )
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], (Mapping, ChatMessage)):
        return _chat_prompt(prompt, options)
    _refuse_options(options, _CHAT_OPTIONS, "chat messages")
    if isinstance(prompt, str):
        return TextPrompt(prompt, options.get("add_special_tokens", True))
    _refuse_options(options, ("add_special_tokens",), "a text")
    return TokenPrompt(tuple(_token_id(item) for item in prompt))


def _chat_prompt(messages: Sequence[Any], options: PromptOptions) -> ChatPrompt:
    _refuse_options(options, ("add_special_tokens",), "a text")
    tools, names = options.get("tools") or (), options.get("chat_template_kwargs") or {}
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InvalidRequestError("must be a list of tools", field="tools")
    return ChatPrompt(
        tuple(_chat_message(message) for message in messages),
        tools=tuple(tools),
        template_kwargs=names,
        add_generation_prompt=options.get("add_generation_prompt", True),
        continue_final_message=options.get("continue_final_message", False),
    )


def _refuse_options(options: PromptOptions, names: Sequence[str], only_for: str) -> None:
    given: Mapping[str, object] = {**options}
    for name in names:
        if given.get(name) and name not in _NEUTRAL:
            raise InvalidRequestError(f"goes with {only_for} only", field=name)
        if name in _NEUTRAL and given.get(name, _NEUTRAL[name]) != _NEUTRAL[name]:
            raise InvalidRequestError(f"goes with {only_for} only", field=name)


def _token_id(item: object) -> Any:
    """Return a plain int for other whole numbers (numpy's); TokenPrompt checks every id."""
    if type(item) is int or isinstance(item, bool) or not isinstance(item, SupportsIndex):
        return item
    return operator.index(item)


def prompt_token_bound(prompt: Prompt) -> int:
    """Return how many tokens `prompt` can be at most: exact for token ids.

    A byte-level tokenizer never makes more tokens than there are bytes.
    """
    match prompt:
        case TokenPrompt(token_ids):
            return len(token_ids)
        case TextPrompt(text):
            return len(text.encode()) + TEXT_MARGIN
        case ChatPrompt(messages):
            size = sum(len(m.role.encode()) + m.num_bytes for m in messages)
            size += sum(map(encoded_size, prompt.tools))
            return size + MESSAGE_MARGIN * len(messages) + TEMPLATE_MARGIN


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
