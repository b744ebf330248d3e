"""Messages of a chat: OpenAI's forms to the protocol's, which knows text and calls of tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.prompts import MAX_CHAT_MESSAGES, MESSAGE_FIELDS, ChatMessage

#: What stands between a message's parts, as in vLLM.
PART_SEPARATOR: Final = "\n"

#: OpenAI's newer name of a role that every template knows by its older one.
_ROLES: Final = {"developer": "system"}
_KNOWN_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
#: What clients send back of an answer, and means nothing when it is empty.
_EMPTY_FIELDS: Final = ("refusal", "annotations", "audio", "function_call", "tool_calls", "name")
_TEXT_PARTS: Final = {"text": "text", "refusal": "refusal"}


def conversation(messages: Any) -> list[ChatMessage]:
    """Return a body's `messages` as `AsyncClient.submit` takes them.

    Raises `InvalidRequestError`, which names the message, for what is not text or a call of a tool.
    """
    if not isinstance(messages, list):
        raise InvalidRequestError("must be a list of messages", field="messages")
    if len(messages) > MAX_CHAT_MESSAGES:
        raise InvalidRequestError(
            f"{len(messages)} messages are more than {MAX_CHAT_MESSAGES}",
            field="messages",
            limit=MAX_CHAT_MESSAGES,
        )
    return [_message(f"messages[{k}]", message) for k, message in enumerate(messages)]


def _message(place: str, message: Any) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidRequestError("must be an object with role and content", field=place)
    role: Any = message.get("role")
    if role not in _KNOWN_ROLES:
        known = ", ".join(_KNOWN_ROLES)
        raise InvalidRequestError(f"must be one of {known}", field=f"{place}.role")
    told: dict[str, Any] = {}
    for name, value in message.items():
        if name in ("role", "content") or (name in _EMPTY_FIELDS and not value):
            continue
        if name not in MESSAGE_FIELDS:
            raise InvalidRequestError("is not supported", field=f"{place}.{name[:80]}")
        if value is not None:
            told[name] = value
    _check_fields(place, role, told)
    content = _content(f"{place}.content", message.get("content"), told)
    try:
        return ChatMessage(_ROLES.get(role, role), content, told)
    except InvalidRequestError as error:
        raise error.of_field(f"{place}{error.field.removeprefix('messages')}") from None


def _check_fields(place: str, role: str, told: Mapping[str, Any]) -> None:
    """Keep tool calls to assistants, and their answers to tools."""
    for name, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if name in told and role != owner:
            raise InvalidRequestError(f"belongs to role {owner}", field=f"{place}.{name}")


def _content(place: str, content: Any, told: Mapping[str, Any]) -> str:
    if isinstance(content, str):
        return content
    if content is None and "tool_calls" in told:
        return ""  # as in vLLM: many templates add it to other text without a look
    if not isinstance(content, list):
        raise InvalidRequestError("must be text, or a list of parts of type text", field=place)
    return PART_SEPARATOR.join(_part(f"{place}[{k}]", part) for k, part in enumerate(content))


def _part(place: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidRequestError("must be an object with a type", field=place)
    if kind not in _TEXT_PARTS:
        raise InvalidRequestError(
            f"{kind[:80]!r} is not supported: text only", field=f"{place}.type"
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequestError("must be text", field=f"{place}.{_TEXT_PARTS[kind]}")
    return text
