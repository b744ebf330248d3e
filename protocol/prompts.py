"""What a job asks about: a text, token ids, or a conversation with the tools that it may use.

On the wire: `p` a text or a list of token ids, with `as` false for a text without the special
tokens around it; or `m` chat messages, each [role, content] or [role, content, more fields by
name], with `tl` tools, `ck` names for the chat template, and `cg` [whether the template begins an
answer, whether the last message is left open] where that is not [true, false].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.json_values import encoded_size, json_object, read_object
from inferq.protocol.param_checks import MAX_TOKEN_ID, check_boolean, check_utf8
from inferq.protocol.wire import typed

#: Most bytes of a prompt's text, or of all its chat messages together.
MAX_PROMPT_BYTES: Final = 4 * 2**20
#: Most token ids of a prompt.
MAX_PROMPT_TOKENS: Final = 2**20
MAX_CHAT_MESSAGES: Final = 4096
#: Most bytes of a role, a model's name, a tool's name or the id of a call.
MAX_NAME_BYTES: Final = 256
#: Most calls of tools in one message.
MAX_TOOL_CALLS: Final = 1024
#: Most tools of a prompt, and the bytes of all of them together, encoded.
MAX_TOOLS: Final = 1024
MAX_TOOLS_BYTES: Final = 2**20
#: Most names for a chat template, and their bytes, encoded.
MAX_TEMPLATE_NAMES: Final = 64
MAX_TEMPLATE_BYTES: Final = 2**16
#: What a message may have besides role and content.
MESSAGE_FIELDS: Final = ("name", "reasoning_content", "tool_call_id", "tool_calls")
#: Names that a chat template has from elsewhere.
RESERVED_TEMPLATE_NAMES: Final = frozenset(
    {
        *("messages", "tools", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now"),
        *(f"{kind}_token" for kind in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")),
    }
)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as text, tokenized by the worker, with the model's special tokens around it."""

    text: str
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidRequestError(
                f"must be text, not {type(self.text).__name__}", field="prompt"
            )
        if not self.text:
            raise InvalidRequestError("is empty", field="prompt", limit=1)
        _check_prompt_bytes("prompt", len(check_utf8("prompt", self.text)))
        check_boolean("add_special_tokens", self.add_special_tokens)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as token ids, taken as they are."""

    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        ids = self.token_ids
        if not ids:
            raise InvalidRequestError("is empty", field="prompt_token_ids", limit=1)
        if len(ids) > MAX_PROMPT_TOKENS:
            raise InvalidRequestError(
                f"{len(ids)} token ids are more than {MAX_PROMPT_TOKENS}",
                field="prompt_token_ids",
                limit=MAX_PROMPT_TOKENS,
            )
        # type() is int: bools are no ids, and this runs over up to a million of them
        if not all(type(i) is int and 0 <= i <= MAX_TOKEN_ID for i in ids):
            raise InvalidRequestError(
                f"every id must be a whole number in [0, {MAX_TOKEN_ID}]",
                field="prompt_token_ids",
                limit=MAX_TOKEN_ID,
            )


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `role` is `system`, `user`, `assistant`, `tool` or another.

    `extra` may have `name`, `tool_call_id` and `reasoning_content`, which are texts, and
    `tool_calls`, a list of OpenAI's objects with the arguments as text, JSON unless they were cut.
    `content` is None only beside `tool_calls`.
    """

    role: str
    content: str | None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("messages.role", self.role)
        object.__setattr__(self, "extra", _checked_extra(self.extra))
        if self.content is None and self.extra.get("tool_calls"):
            return
        if not isinstance(self.content, str):
            raise InvalidRequestError(
                f"must be text, not {type(self.content).__name__}", field="messages.content"
            )
        check_utf8("messages.content", self.content)

    @property
    def num_bytes(self) -> int:
        """Bytes of the content and of all that the message has besides its role."""
        size = 0 if self.content is None else len(self.content.encode())
        return size + (encoded_size(self.extra) if self.extra else 0)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as a conversation, rendered by the model's chat template on the worker.

    - `tools`: functions that the model may call, as OpenAI's objects.
    - `template_kwargs`: more names for the template, such as `enable_thinking`.
    - `add_generation_prompt`: whether the template begins the assistant's answer.
    - `continue_final_message`: leave the last message open, so that the output goes on with it.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        _check_count("messages", len(self.messages), MAX_CHAT_MESSAGES, "messages")
        if not self.messages:
            raise InvalidRequestError("is empty", field="messages", limit=1)
        _check_prompt_bytes("messages", sum(message.num_bytes for message in self.messages))
        object.__setattr__(self, "tools", _checked_tools(self.tools))
        object.__setattr__(self, "template_kwargs", _checked_template_names(self.template_kwargs))
        check_boolean("add_generation_prompt", self.add_generation_prompt)
        check_boolean("continue_final_message", self.continue_final_message)
        if self.continue_final_message:
            self._check_open_message()

    def _check_open_message(self) -> None:
        field = "continue_final_message"
        if self.add_generation_prompt:
            raise InvalidRequestError(
                "goes not together with add_generation_prompt: the last message is left open, or a "
                "new one begun",
                field=field,
            )
        if self.messages[-1].content is None:
            raise InvalidRequestError("the last message has no content to continue", field=field)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


def encode_prompt(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt's share of a job's map."""
    match prompt:
        case TextPrompt(text, add_special_tokens):
            return {"p": text} if add_special_tokens else {"p": text, "as": False}
        case TokenPrompt(token_ids):
            return {"p": token_ids}
        case ChatPrompt():
            return _encode_chat(prompt)


def decode_prompt(wire: Mapping[str, Any]) -> Prompt:
    """Read a prompt from a job's map.

    Raises `LookupError` or `TypeError` for what is none, `InvalidRequestError` for one that is not
    allowed.
    """
    if ("p" in wire) == ("m" in wire):
        raise LookupError("a job has either p or m")
    if "m" in wire:
        return _decode_chat(wire)
    if isinstance(wire["p"], str):
        return TextPrompt(wire["p"], typed(wire, "as", bool, True))
    return TokenPrompt(tuple(typed(wire, "p", list)))


def check_name(name: str, value: object) -> None:
    """Raise `InvalidRequestError` unless the value is text of 1 to 256 bytes."""
    if not isinstance(value, str) or not value:
        raise InvalidRequestError("must be text that is not empty", field=name)
    if len(check_utf8(name, value)) > MAX_NAME_BYTES:
        raise InvalidRequestError(
            f"is longer than {MAX_NAME_BYTES} bytes", field=name, limit=MAX_NAME_BYTES
        )


def tool_arguments(call: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return the arguments of a checked tool call as the JSON object that their text spells.

    No text is an empty object. Text that spells none is returned as it is: a model wrote it, and
    its answer may have been cut before the end.
    """
    text: str = call["function"].get("arguments", "")
    if not text.strip():
        return {}
    try:
        return read_object("arguments", text)
    except InvalidRequestError:
        return text


def _encode_chat(prompt: ChatPrompt) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "m": [
            [m.role, m.content, m.extra] if m.extra else [m.role, m.content]
            for m in prompt.messages
        ]
    }
    if prompt.tools:
        wire["tl"] = prompt.tools
    if prompt.template_kwargs:
        wire["ck"] = prompt.template_kwargs
    ends = [prompt.add_generation_prompt, prompt.continue_final_message]
    if ends != [True, False]:
        wire["cg"] = ends
    return wire


def _decode_chat(wire: Mapping[str, Any]) -> ChatPrompt:
    ends = typed(wire, "cg", list, [True, False])
    if len(ends) != 2:
        raise TypeError("cg must be a list of two")
    return ChatPrompt(
        messages=tuple(_decode_message(row) for row in typed(wire, "m", list)),
        tools=tuple(typed(wire, "tl", list, [])),
        template_kwargs=typed(wire, "ck", dict, {}),
        add_generation_prompt=ends[0],
        continue_final_message=ends[1],
    )


def _decode_message(row: Any) -> ChatMessage:
    if not isinstance(row, list) or len(row) not in (2, 3):
        raise TypeError("a message must be a list of two or three")
    return ChatMessage(*row)


def _checked_extra(extra: object) -> dict[str, Any]:
    copied = json_object("messages", extra, max_bytes=MAX_PROMPT_BYTES)
    for name, value in copied.items():
        field = f"messages.{name}"
        if name not in MESSAGE_FIELDS:
            raise InvalidRequestError("is not a field of a message", field=field)
        if name == "tool_calls":
            _check_tool_calls(value)
        elif name == "reasoning_content":
            if not isinstance(value, str):
                raise InvalidRequestError("must be text", field=field)
        else:
            check_name(field, value)
    return copied


def _check_tool_calls(calls: object) -> None:
    whole = "messages.tool_calls"
    if not isinstance(calls, list):
        raise InvalidRequestError("must be a list of calls", field=whole)
    _check_count(whole, len(calls), MAX_TOOL_CALLS, "calls")
    for index, call in enumerate(calls):
        field = f"{whole}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise InvalidRequestError("must be a call of a function", field=field)
        check_name(f"{field}.function.name", function.get("name"))
        if call.get("id") is not None:
            check_name(f"{field}.id", call["id"])
        if not isinstance(function.get("arguments", ""), str):
            raise InvalidRequestError("must be text", field=f"{field}.function.arguments")


def _checked_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    _check_count("tools", len(tools), MAX_TOOLS, "tools")
    checked = tuple(json_object("tools", tool, max_bytes=MAX_TOOLS_BYTES) for tool in tools)
    size = sum(map(encoded_size, checked))
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequestError(
            f"{size} bytes are more than {MAX_TOOLS_BYTES}", field="tools", limit=MAX_TOOLS_BYTES
        )
    for tool in checked:
        function = tool.get("function")
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise InvalidRequestError("every tool must be a function", field="tools")
        check_name("tools.function.name", function.get("name"))
    return checked


def _checked_template_names(names: Mapping[str, Any]) -> dict[str, Any]:
    field = "chat_template_kwargs"
    checked = json_object(field, names, max_bytes=MAX_TEMPLATE_BYTES)
    _check_count(field, len(checked), MAX_TEMPLATE_NAMES, "names")
    for name in checked:
        if name in RESERVED_TEMPLATE_NAMES:
            raise InvalidRequestError("is set by the request itself", field=f"{field}.{name}")
    return checked


def _check_count(field: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise InvalidRequestError(f"{count} {what} are more than {most}", field=field, limit=most)


def _check_prompt_bytes(name: str, size: int) -> None:
    if size > MAX_PROMPT_BYTES:
        raise InvalidRequestError(
            f"{size} bytes are more than {MAX_PROMPT_BYTES}", field=name, limit=MAX_PROMPT_BYTES
        )
