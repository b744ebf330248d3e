"""JSON of tool calls in text that comes in pieces: where a call's object begins and ends."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

#: JSON's white space.
SPACE: Final = " \t\r\n"


class Mark:
    """A piece of mark-up, with white space wherever the pattern has a space; 1 KiB at most.

    `shortest` are texts of it, one for each of its forms: some ending of one of them completes
    every text that may become the mark.
    """

    _MAX_LENGTH: Final = 1024

    def __init__(self, pattern: str, *shortest: str) -> None:
        # Possessive: long white space is gone through once.
        self._pattern = re.compile(pattern.replace(" ", f"[{SPACE}]*+"))
        self._shortest = shortest

    def match(self, text: str) -> re.Match[str] | None:
        """Match the mark at the text's beginning."""
        # One more for what it looks ahead to.
        return self._pattern.match(text, 0, self._MAX_LENGTH + 1)

    def may_begin(self, text: str) -> bool:
        """Whether more text could make the mark of this one."""
        endings = (form[k:] for form in self._shortest for k in range(len(form)))
        return len(text) <= self._MAX_LENGTH and any(
            self._pattern.match(text + ending) for ending in endings
        )


_NAMED: Final = r' \{ (?:"type" : "function" , )?"name" : "(?P<name>[A-Za-z0-9_.-]{1,128})"'
#: A call up to its name.
NAMED: Final = Mark(_NAMED, '{"name":"f"', '{"type":"function","name":"f"')
#: A call up to its arguments' brace: `{"name": "…", "arguments": `; the group `name` is it.
HEADER: Final = Mark(
    _NAMED + r' , "(?:arguments|parameters)" : (?=\{)',
    *(
        f'{{{first}"name":"f","{key}":{{'
        for first in ("", '"type":"function",')
        for key in ("arguments", "parameters")
    ),
)

_STRING_ENDS: Final = re.compile(r'["\\]')
_BETWEEN: Final = re.compile(r"[-+.,:\w \t\r\n]*", re.ASCII)
_CLOSED_BY: Final = {"{": "}", "[": "]"}


class Scan(Enum):
    """What has become of an object so far."""

    OPEN = auto()
    CLOSED = auto()
    #: What follows cannot be JSON.
    BROKEN = auto()


class ObjectScanner:
    """Finds the end of one JSON object, which begins with the first character scanned."""

    __slots__ = ("_closing", "_is_escaped", "_is_in_string")

    def __init__(self) -> None:
        self._closing: list[str] = []
        self._is_in_string = False
        self._is_escaped = False

    def scan(self, text: str) -> tuple[int, Scan]:
        """Return how many of the next characters belong to the object, and how it stands."""
        position = 0
        while position < len(text):
            if self._is_in_string:
                position = self._scan_string(text, position)
                continue
            between = _BETWEEN.match(text, position)
            position = position if between is None else between.end()
            if position == len(text):
                break
            character = text[position]
            if character == '"':
                self._is_in_string = True
            elif character in _CLOSED_BY:
                self._closing.append(_CLOSED_BY[character])
            elif self._closing and character == self._closing[-1]:
                self._closing.pop()
                if not self._closing:
                    return position + 1, Scan.CLOSED
            else:
                return position, Scan.BROKEN
            position += 1
        return len(text), Scan.OPEN

    def _scan_string(self, text: str, position: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return position + 1
        found = _STRING_ENDS.search(text, position)
        if found is None:
            return len(text)
        self._is_in_string = found[0] != '"'
        self._is_escaped = found[0] == "\\"
        return found.end()
