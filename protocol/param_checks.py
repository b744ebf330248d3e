"""The checks of parameters: each names the field and the limit it breaks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from inferq.protocol.errors import InvalidRequestError

MAX_TOKEN_ID: Final = 2**31 - 1


def check_number(
    field: str, value: object, low: float, high: float, *, above_low: bool = False
) -> None:
    """Refuse what is not a finite number in [low, high] ((low, high] with `above_low`)."""
    bound = f"{'(' if above_low else '['}{low:.15g}, {high:.15g}{')' if math.isinf(high) else ']'}"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequestError(
            f"must be a finite number in {bound}, not {value!r}", field=field, limit=bound
        )
    if not low <= value <= high or (above_low and value == low):
        raise InvalidRequestError(f"{value} is not in {bound}", field=field, limit=bound)


def check_integer(field: str, value: object, low: int, high: int) -> None:
    """Refuse what is not a whole number in [low, high]."""
    bound = f"[{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(
            f"must be a whole number in {bound}, not {value!r}", field=field, limit=bound
        )
    if not low <= value <= high:
        raise InvalidRequestError(f"{value} is not in {bound}", field=field, limit=bound)


def check_optional_integer(field: str, value: object, low: int, high: int) -> None:
    """Refuse what is neither None nor a whole number in [low, high]."""
    if value is not None:
        check_integer(field, value, low, high)


def check_boolean(field: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise InvalidRequestError("must be true or false", field=field)


def check_utf8(field: str, text: str) -> bytes:
    """Return `text` in UTF-8; raise `InvalidRequestError` where it holds lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"is not valid Unicode (a lone surrogate at character {error.start})", field=field
        ) from None


def strings(field: str, value: object, *, most: int, longest: int) -> tuple[str, ...]:
    """Return a string, or a list of strings that are not empty, as a tuple; None as an empty one.

    `longest` is in characters.
    """
    items = _items(field, (value,) if isinstance(value, str) else value, most, "strings")
    for item in items:
        if not isinstance(item, str) or not item:
            raise InvalidRequestError("every item must be a string that is not empty", field=field)
        if len(item) > longest:
            raise InvalidRequestError(
                f"{len(item)} characters are more than {longest}", field=field, limit=longest
            )
        check_utf8(field, item)
    return tuple(items)


def token_ids(field: str, value: object, *, most: int) -> tuple[int, ...]:
    """Return a list of token ids as a tuple; None as an empty one."""
    items = _items(field, value, most, "token ids")
    for item in items:
        check_integer(field, item, 0, MAX_TOKEN_ID)
    return tuple(items)


def token_biases(
    field: str, value: object, *, most: int, bound: float
) -> tuple[tuple[int, float], ...]:
    """Return a map (or pairs) of token id to bias as pairs in the order of the ids."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    items = _items(field, pairs, most, "token ids")
    biases: dict[int, float] = {}
    for item in items:
        if not isinstance(item, Sequence) or len(item) != 2:
            raise InvalidRequestError("must map token ids to biases", field=field)
        token_id, bias = item
        if isinstance(token_id, str) and token_id.isascii() and token_id.isdigit():
            token_id = int(token_id)  # JSON has no other keys
        check_integer(field, token_id, 0, MAX_TOKEN_ID)
        check_number(field, bias, -bound, bound)
        biases[token_id] = float(bias)
    return tuple(sorted(biases.items()))


def _items(field: str, value: object, most: int, what: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"must be a list of {what}", field=field)
    if len(value) > most:
        raise InvalidRequestError(
            f"{len(value)} {what} are more than {most}", field=field, limit=most
        )
    return value


def check_size(field: str, size: int, limit: int) -> None:
    """Refuse more than `limit` bytes."""
    if size > limit:
        raise InvalidRequestError(f"{size} bytes are more than {limit}", field=field, limit=limit)


def check_wait(field: str, wait_ms: int, low: int, high: int) -> None:
    """Refuse milliseconds outside of [low, high]."""
    if not low <= wait_ms <= high:
        bound = f"[{low}, {high}]"
        raise InvalidRequestError(f"{wait_ms} ms is not in {bound} ms", field=field, limit=bound)
