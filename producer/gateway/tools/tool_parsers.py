"""Streamed text to content and tool calls, in the mark-up that the model was told to write.

What a parser has yielded depends on the text so far only, not on how it was cut into pieces: a
replica that reads a job's stream again yields the same. What cannot be a call is content: no text
is lost, but for the white space around the mark-up of calls, and the mark-up of a call that is cut
before its name is complete.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Final

from inferq.producer.gateway.tools.tool_deltas import Part, ToolDelta, call_id
from inferq.producer.gateway.tools.tool_text import HEADER, NAMED, SPACE, Mark, ObjectScanner, Scan

#: What a call stands between, in Hermes' mark-up.
BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
#: What may stand between calls that are JSON alone.
SEPARATOR: Final = ";"

_HERMES_CLOSING: Final = Mark(rf" \}} {END}", "}" + END)
_JSON_CLOSING: Final = Mark(r" \}", "}")


class ToolParser(ABC):
    """Reads one output's text, piece by piece."""

    def __init__(self, job_id: str, output_index: int) -> None:
        self._job_id = job_id
        self._output_index = output_index
        self._calls = 0

    @abstractmethod
    def feed(self, text: str) -> list[Part]:
        """Return what more text makes certain."""

    @abstractmethod
    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return what was held back, now that the text has ended, be it `is_cut` at its limit."""

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's word for how the output ended, given the engine's."""
        return reason

    def _begin_call(self, name: str, arguments: str = "") -> ToolDelta:
        index, self._calls = self._calls, self._calls + 1
        identity = call_id(self._job_id, self._output_index, index)
        return ToolDelta(index, arguments, identity, name)

    def _more(self, arguments: str) -> ToolDelta:
        return ToolDelta(self._calls - 1, arguments)


class TextParser(ToolParser):
    """Text without calls."""

    def feed(self, text: str) -> list[Part]:
        """Return the text."""
        return [text] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Part]:  # noqa: ARG002 - as for all
        """Return nothing: nothing is held back."""
        return []


class ArgumentsParser(ToolParser):
    """Text that is all arguments: those of the one function that had to be called."""

    def __init__(self, job_id: str, output_index: int, name: str) -> None:
        super().__init__(job_id, output_index)
        self._name = name

    def feed(self, text: str) -> list[Part]:
        """Return the text as arguments, after the call's name."""
        if not text:
            return []
        if self._calls == 0:
            return [self._begin_call(self._name, text)]
        return [self._more(text)]

    def finish(self, *, is_cut: bool = False) -> list[Part]:  # noqa: ARG002 - as for all
        """Return nothing: nothing is held back."""
        return []


class _MarkedParser(ToolParser):
    """Calls among text: in turn a state reads what it can of the text not yet understood.

    `is_calls_only` says that the model can write nothing but calls.
    """

    _closing: ClassVar[Mark]
    #: Characters that mean nothing between calls.
    _between: ClassVar[str] = SPACE

    def __init__(self, job_id: str, output_index: int, *, is_calls_only: bool = False) -> None:
        super().__init__(job_id, output_index)
        self._is_calls_only = is_calls_only
        self._parts: list[Part] = []
        self._rest = ""
        #: White space and mark-up that is content if no call follows.
        self._gap = ""
        self._complete = 0
        self._arguments = ObjectScanner()
        self._read: Callable[[], bool] = self._read_text

    def feed(self, text: str) -> list[Part]:
        """Return what more text makes certain."""
        self._rest += text
        while self._rest and self._read():
            pass
        return self._taken()

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return what was held back; what may stand between calls is dropped after one.

        A call that is cut has a name or is none: its mark-up is no content.
        """
        if is_cut and self._is_within_call():
            found = NAMED.match(self._rest)
            if found is not None:
                self._parts.append(self._begin_call(found["name"]))
            self._rest = self._gap = ""
            return self._taken()
        self._end()
        held, self._rest, self._gap = self._gap + self._rest, "", ""
        if held and not (self._calls and not held.strip(self._between)):
            self._parts.append(held)
        return self._taken()

    def finish_reason(self, reason: str) -> str:
        """Return `tool_calls` for an output that stopped and has a call with all its arguments."""
        return "tool_calls" if self._complete and reason == "stop" else reason

    @abstractmethod
    def _read_text(self) -> bool:
        """Read content, up to a call; return whether there is more to read."""

    @abstractmethod
    def _is_within_call(self) -> bool:
        """Whether the text that is held back is certainly a call's, before its arguments."""

    @abstractmethod
    def _after_call(self) -> Callable[[], bool]:
        """Return what reads on after a whole call."""

    @property
    def _expects_call(self) -> bool:
        """Whether what may be the beginning of a call is taken for one."""
        return self._is_calls_only or self._calls > 0

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _end(self) -> None:
        """Understand what the end of the text makes certain."""
        if self._read == self._read_closing:
            self._rest = ""

    def _begin_arguments(self) -> bool:
        """Begin the call whose header the rest of the text begins with, if it does."""
        found = HEADER.match(self._rest)
        if found is None:
            return False
        self._parts.append(self._begin_call(found["name"]))
        self._rest, self._gap = self._rest[found.end() :], ""
        self._arguments = ObjectScanner()
        self._read = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        count, state = self._arguments.scan(self._rest)
        if count:
            self._add_arguments(self._rest[:count])
        self._rest = self._rest[count:]
        if state is Scan.CLOSED:
            self._complete += 1
            self._read = self._read_closing
        elif state is Scan.BROKEN:
            self._read = self._read_text
        return state is not Scan.OPEN

    def _add_arguments(self, arguments: str) -> None:
        # With the name, where both are new: some clients want one piece of a call in a chunk.
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ToolDelta) and last.index == self._calls - 1:
            self._parts[-1] = replace(last, arguments=last.arguments + arguments)
        else:
            self._parts.append(self._more(arguments))

    def _read_closing(self) -> bool:
        found = self._closing.match(self._rest)
        if found is not None:
            self._rest = self._rest[found.end() :]
            self._read = self._after_call()
        elif self._closing.may_begin(self._rest):
            return False
        else:
            self._read = self._read_text
        return True


class HermesParser(_MarkedParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, among text."""

    _closing = _HERMES_CLOSING

    def _read_text(self) -> bool:
        before, tag, after = self._rest.partition(BEGIN)
        text = before if tag else before[: len(before) - _length_of_mark(before)]
        content = text.rstrip(SPACE)
        if content:
            self._parts.append(self._gap + content)
            self._gap = ""
        self._gap += text[len(content) :] + tag
        if tag:
            self._read = self._read_header
        self._rest = after if tag else before[len(text) :]
        return bool(tag)

    def _read_header(self) -> bool:
        if self._begin_arguments():
            return True
        body, tag, after = self._rest.partition(END)
        if not tag:
            return False
        self._rest = after
        self._add_whole(body, self._gap + body + tag)
        return True

    def _is_within_call(self) -> bool:
        if self._read == self._read_header:
            return HEADER.may_begin(self._rest)
        return bool(self._rest) and self._read == self._read_text and self._expects_call

    def _after_call(self) -> Callable[[], bool]:
        return self._read_text

    def _end(self) -> None:
        super()._end()
        if self._read == self._read_header:
            body, self._rest = self._rest, ""
            self._add_whole(body, self._gap + body)

    def _add_whole(self, body: str, text: str) -> None:
        """Add a call in another order than usual, or the text if it is none."""
        call = _read_call(body)
        if call is None:
            self._parts.append(text)
        else:
            name, arguments = call
            self._parts.append(self._begin_call(name, arguments))
            self._complete += 1
        self._gap = ""
        self._read = self._read_text


class JsonParser(_MarkedParser):
    """`{"name": …, "parameters": {…}}` in place of text; several with `;` between them."""

    _closing = _JSON_CLOSING
    _between = SPACE + SEPARATOR

    def __init__(self, job_id: str, output_index: int, *, is_calls_only: bool = False) -> None:
        super().__init__(job_id, output_index, is_calls_only=is_calls_only)
        self._read = self._read_header
        self._may_be_separated = False

    def _read_header(self) -> bool:
        self._skip_space()
        if self._may_be_separated and self._rest.startswith(SEPARATOR):
            self._gap, self._rest = self._gap + SEPARATOR, self._rest[1:]
            self._may_be_separated = False
            self._skip_space()
        if self._begin_arguments():
            return True
        if HEADER.may_begin(self._rest):
            return False
        self._read = self._read_text
        return True

    def _read_text(self) -> bool:
        self._parts.append(self._gap + self._rest)
        self._rest = self._gap = ""
        return False

    def _is_within_call(self) -> bool:
        return bool(self._rest) and self._read == self._read_header and self._expects_call

    def _after_call(self) -> Callable[[], bool]:
        self._may_be_separated = True
        return self._read_header

    def _skip_space(self) -> None:
        rest = self._rest.lstrip(SPACE)
        self._gap += self._rest[: len(self._rest) - len(rest)]
        self._rest = rest


def _length_of_mark(text: str) -> int:
    """Return how much of the text's end may be the beginning of a `<tool_call>`."""
    return next((k for k in range(len(BEGIN) - 1, 0, -1) if text.endswith(BEGIN[:k])), 0)


def _read_call(body: str) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON text, of a call that is a JSON object."""
    try:
        call = json.loads(body)
        name = call["name"]
        arguments = call.get("arguments", call.get("parameters", {}))
        # Some models write the arguments as text that is JSON.
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
