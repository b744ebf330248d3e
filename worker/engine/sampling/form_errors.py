"""What is wrong with a form, as one sentence: llguidance draws it in several lines."""

from __future__ import annotations

import re
from typing import Final

_MAX_MESSAGE: Final = 500
#: The lines of the grammar behind a message, with a mark below the one that is meant.
_LISTING: Final = re.compile(r"(?:\n +\d+ \| [^\n]*(?:\n +\^+)?)+\s*\Z")
#: Where in the grammar it is. That of an expression alone is ours, with one line.
_PLACE: Final = re.compile(r"\A(?:at )?(\d+)\((\d+)\): ")
_EXPRESSION: Final = re.compile(r'invalid regex ".*" \(in [^)]*\): ', re.DOTALL)
#: The expression, marks below what is wrong in it, and why.
_DRAWN: Final = re.compile(
    r"regex parse error:\n {4}(?P<text>[^\n]*)\n {4}(?P<before> *)(?P<marks>\^+)[^\n]*\n"
    r"error: (?P<reason>[^\n]*)"
)
_BOUNDARY: Final = re.compile(r"lookarounds not supported yet; \w+ in regex /.*/", re.DOTALL)


def readable_error(message: str, *, is_expression: bool) -> str:
    """Return llguidance's message without its drawings.

    `is_expression` says that the form is a regular expression, and no grammar with places to name.
    """
    text = _LISTING.sub("", message)
    text = _PLACE.sub("" if is_expression else r"line \1, column \2: ", text)
    text = _EXPRESSION.sub("", text)
    text = _DRAWN.sub(_reason, text)
    text = _BOUNDARY.sub("word boundaries and other look-around are not supported", text)
    return " ".join(text.split())[:_MAX_MESSAGE]


def _reason(drawn: re.Match[str]) -> str:
    start = len(drawn["before"])
    marked = drawn["text"][start : start + len(drawn["marks"])]
    return f"{drawn['reason']}, at '{marked}'"
