"""JSON values that travel inside messages: checked, bounded, and copied."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import msgpack

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.param_checks import check_utf8

#: Deepest nesting of a value.
MAX_JSON_DEPTH: Final = 64
#: Whole numbers that msgpack can hold.
_INTEGERS: Final = range(-(2**63), 2**64)


def json_object(field: str, value: object, *, max_bytes: int) -> dict[str, Any]:
    """Return a copy of an object of JSON values; raise `InvalidRequestError` for anything else.

    `max_bytes` is of its encoded form.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"must be an object, not {type(value).__name__}", field=field)
    copied: dict[str, Any] = _copied(field, value, MAX_JSON_DEPTH)
    size = encoded_size(copied)
    if size > max_bytes:
        raise InvalidRequestError(
            f"{size} bytes are more than {max_bytes}", field=field, limit=max_bytes
        )
    return copied


def encoded_size(value: object) -> int:
    """Return how many bytes a checked value has in a message."""
    return len(msgpack.packb(value))


def read_object(field: str, text: str) -> dict[str, Any]:
    """Return the JSON object that `text` spells; raise `InvalidRequestError` if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"is not JSON: {error}", field=field) from None
    if not isinstance(value, dict):
        raise InvalidRequestError("is not a JSON object", field=field)
    copied: dict[str, Any] = _copied(field, value, MAX_JSON_DEPTH)
    return copied


def _copied(field: str, value: object, depth: int) -> Any:
    if isinstance(value, str):
        check_utf8(field, value)
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return _number(field, value)
    if depth == 0:
        raise InvalidRequestError(
            f"is nested deeper than {MAX_JSON_DEPTH}", field=field, limit=MAX_JSON_DEPTH
        )
    if isinstance(value, (list, tuple)):
        return [_copied(field, item, depth - 1) for item in value]
    if isinstance(value, Mapping):
        return {_key(field, key): _copied(field, item, depth - 1) for key, item in value.items()}
    raise InvalidRequestError(f"{type(value).__name__} is no JSON value", field=field)


def _key(field: str, key: object) -> str:
    if not isinstance(key, str):
        raise InvalidRequestError("the keys of an object are text", field=field)
    check_utf8(field, key)
    return key


def _number(field: str, value: float) -> float:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequestError(f"{value} is no JSON number", field=field)
    if isinstance(value, int) and value not in _INTEGERS:
        raise InvalidRequestError("has a whole number beyond 64 bits", field=field, limit="64 bits")
    return value
