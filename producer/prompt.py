"""What a producer may give as a prompt: text, token ids or chat messages, with their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Unpack, cast

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.json_values import encoded_size
from inferq.protocol.prompt_inputs import (
    ChatInput,
    ChatOptions,
    chat_prompt,
    check_names,
    token_prompt,
)
from inferq.protocol.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

#: What `submit` takes: text, token ids, or the messages of a chat.
PromptInput = str | Sequence[int] | Sequence[ChatInput]


class PromptOptions(ChatOptions, total=False):
    """How token ids are made of a prompt: of a text, or of chat messages (`ChatOptions`).

    - `add_special_tokens`: whether a text gets the model's special tokens around it.
    """

    add_special_tokens: bool


#: Tokens that a tokenizer may add to a text (begin and end marks).
TEXT_MARGIN: Final = 8
#: Tokens that a chat template adds per message (marks of its role, its begin and its end), and
#: once (a default system prompt, some 30 tokens in common ones, and the start of the answer).
#: A bound for choosing a worker only: the worker counts the tokens themselves.
MESSAGE_MARGIN: Final = 16
TEMPLATE_MARGIN: Final = 112
_CHAT_OPTIONS: Final = tuple(sorted(ChatOptions.__optional_keys__))
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
    check_names(options, PromptOptions.__optional_keys__)
    if messages is not None:
        if prompt is not None:
            raise InvalidRequestError("goes not together with messages", field="prompt")
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
    return token_prompt(prompt)


def _chat_prompt(messages: Sequence[Any], options: PromptOptions) -> ChatPrompt:
    _refuse_options(options, ("add_special_tokens",), "a text")
    given = {**options}
    given.pop("add_special_tokens", None)
    return chat_prompt(messages, **cast("ChatOptions", given))


def _refuse_options(options: PromptOptions, names: Sequence[str], only_for: str) -> None:
    given: Mapping[str, object] = {**options}
    for name in names:
        if given.get(name) and name not in _NEUTRAL:
            raise InvalidRequestError(f"goes with {only_for} only", field=name)
        if name in _NEUTRAL and given.get(name, _NEUTRAL[name]) != _NEUTRAL[name]:
            raise InvalidRequestError(f"goes with {only_for} only", field=name)


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
