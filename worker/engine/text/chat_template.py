"""Chat templates as model folders carry them: Jinja, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, TypedDict

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inferq.protocol.errors import InvalidRequestError, ModelError
from inferq.protocol.prompts import ChatMessage, tool_arguments

#: What a template can raise on messages that it was not written for.
_RENDER_ERRORS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
)
#: Marks the end of a message that is to be continued, until it is cut off.
_OPEN_END: Final = "<<end-of-open-message>> "


class ChatOptions(TypedDict, total=False):
    """What a conversation may have besides its messages; `names` are for the template alone."""

    tools: Sequence[Mapping[str, Any]]
    names: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


class ChatTemplate:
    """A compiled chat template; `render` may be called from any thread.

    Templates come with models and are not trusted: they run in Jinja's immutable sandbox, with
    the names that Hugging Face's templates expect.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template cannot be compiled: {error}") from None

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        names: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        now: datetime | None = None,
    ) -> str:
        """Return the conversation as text; `now` is the date that the template may mention.

        `names` are for the template alone. With `continue_final_message` the text ends within the
        last message, where its content does. Raises `InvalidRequestError` (field `messages`) for
        what the template refuses.
        """
        clock = now or datetime.now(UTC)
        shown = [_shown(message) for message in messages]
        if continue_final_message:
            shown[-1]["content"] += _OPEN_END
        try:
            text = self._template.render(
                {
                    "documents": None,
                    **names,
                    **self._special_tokens,
                    "messages": shown,
                    "tools": list(tools) or None,
                    "add_generation_prompt": add_generation_prompt,
                    "strftime_now": clock.strftime,
                }
            )
        except _RENDER_ERRORS as error:
            raise InvalidRequestError(
                f"the model's chat template refuses them: {error}", field="messages"
            ) from None
        return _cut_at_open_end(text, messages[-1]) if continue_final_message else text


def _shown(message: ChatMessage) -> dict[str, Any]:
    """Return a message as templates expect it: with some content, and arguments as objects.

    Arguments that are no JSON object, as those of a call that was cut, are the text they are.
    """
    shown: dict[str, Any] = {"role": message.role, **message.extra}
    # Many templates put a string before it, and would fail on what is none.
    shown["content"] = message.content or ""
    if (reasoning := message.extra.get("reasoning_content")) is not None:
        shown["thinking"] = reasoning  # the name in some templates
    if calls := message.extra.get("tool_calls"):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": tool_arguments(call)}}
            for call in calls
        ]
    return shown


def _cut_at_open_end(text: str, last: ChatMessage) -> str:
    content = (last.content or "").strip()
    end = text.rfind(_OPEN_END.rstrip())
    if end < 0 or content not in text[:end]:
        raise InvalidRequestError(
            "the model's chat template does not show the last message as it is",
            field="continue_final_message",
        )
    # The space after the mark is gone where the template trims; then it would trim the content too.
    return text[:end] if text.startswith(_OPEN_END, end) else text[:end].rstrip()


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's text for training: renders its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
