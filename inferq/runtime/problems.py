"""What pydantic finds wrong with a setting, or with a field of a file, in the project's words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from pydantic_core import ErrorDetails

#: By pydantic's kind of error; braces are filled from its context. None of them shows the value,
#: which may be secret.
_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "missing": "must be given",
        "extra_forbidden": "is not known",
        "bool_parsing": "must be true or false",
        "bool_type": "must be true or false",
        "int_parsing": "must be a whole number",
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "int_parsing_size": "has too many digits",
        "float_parsing": "must be a number",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "greater_than": "must be greater than {gt}",
        "greater_than_equal": "must be greater than or equal to {ge}",
        "less_than": "must be less than {lt}",
        "less_than_equal": "must be less than or equal to {le}",
        "literal_error": "must be {expected}",
        "enum": "must be {expected}",
        "string_type": "must be text",
        "string_unicode": "must be valid UTF-8",
        "string_pattern_mismatch": "must match {pattern}",
        "path_type": "must be a path",
        "list_type": "must be a list",
        "tuple_type": "must be a list",
        "dict_type": "must be a map of names to values",
        "model_type": "must be an object",
        "json_invalid": "Invalid JSON: {error}",
    }
)
#: What has a length: the kinds for too little and too much of it.
_SHORT: Final[Mapping[str, str]] = MappingProxyType(
    {"string_too_short": "character", "too_short": "item"}
)
_LONG: Final[Mapping[str, str]] = MappingProxyType(
    {"string_too_long": "character", "too_long": "item"}
)


def describe(problem: ErrorDetails) -> str:
    """Return what is wrong, such as "must be a whole number"; the value is not in it."""
    kind = problem["type"]
    context = {name: _plain(value) for name, value in problem.get("ctx", {}).items()}
    if kind in _SHORT:
        return f"must have at least {_counted(context['min_length'], _SHORT[kind])}"
    if kind in _LONG:
        return f"must have at most {_counted(context['max_length'], _LONG[kind])}"
    if (words := _WORDS.get(kind)) is not None:
        return words.format(**context)
    # one of our own validators
    return problem["msg"].removeprefix("Value error, ")


def _plain(bound: Any) -> Any:
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _counted(number: Any, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
