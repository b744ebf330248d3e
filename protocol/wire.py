"""msgpack maps with text keys, as all messages are: written, and read with every type checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack

from inferq.protocol.errors import DecodeError

_REQUIRED: Final = object()


def pack(wire: dict[str, Any]) -> bytes:
    """Encode a map."""
    packed: bytes = msgpack.packb(wire, use_bin_type=True)
    return packed


def unpack(payload: bytes, max_bytes: int) -> dict[str, Any]:
    """Decode a map of at most `max_bytes`; raise `DecodeError` for anything else."""
    if len(payload) > max_bytes:
        raise DecodeError(f"{len(payload)} bytes are more than {max_bytes}", payload)
    try:
        # Containers cannot hold more items than the payload has bytes; msgpack checks that, and
        # the nesting depth, before it allocates.
        wire = msgpack.unpackb(payload, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, TypeError, RecursionError) as error:
        raise DecodeError(f"not msgpack: {error}", payload) from None
    if not isinstance(wire, dict) or not all(isinstance(key, str) for key in wire):
        raise DecodeError("not a map with text keys", payload)
    return wire


def text(value: bytes | None) -> str:
    """Return bytes as text, whatever they are: what people look at need not be Unicode."""
    return "" if value is None else value.decode(errors="replace")


def number(value: bytes | None, default: int = 0) -> int:
    """Return decimal text as a number; the default where it is none."""
    try:
        return default if value is None else int(value)
    except ValueError:
        return default


def typed(wire: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    """Return `wire[key]`, which must be a `kind`; raise `LookupError` or `TypeError`."""
    value = wire.get(key, default)
    if value is _REQUIRED:
        raise LookupError(f"{key} is missing")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{key} must be {kind.__name__}, not {type(value).__name__}")
    return value


def pairs(rows: Any) -> Sequence[tuple[Any, Any]]:
    """Return a list of lists of two as pairs; raise `TypeError` for anything else."""
    if not isinstance(rows, list) or not all(isinstance(r, list) and len(r) == 2 for r in rows):
        raise TypeError("must be a list of pairs")
    return [(a, b) for a, b in rows]
