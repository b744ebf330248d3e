"""How many partitions a queue has, and which of them a job goes to."""

from __future__ import annotations

import os
import secrets
import zlib

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import MAX_PARTITIONS


def to_num_partitions(given: int | None) -> int:
    """Return the number given, else `$INFERQ_PARTITIONS`, else 1, if it is in [1, 1024]."""
    field, value, given_as = "partitions", given, repr(given)
    if value is None:
        text = os.environ.get("INFERQ_PARTITIONS")
        if not text:
            return 1
        field, given_as = "INFERQ_PARTITIONS", text
        value = int(text) if text.isascii() and text.isdigit() else 0
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 1 <= value <= MAX_PARTITIONS:
        raise InvalidRequestError(
            f"must be a whole number in [1, {MAX_PARTITIONS}], not {given_as}",
            field=field,
            limit=MAX_PARTITIONS,
        )
    return value


def choose_partition(num_partitions: int, idempotency_key: str | None) -> int:
    """Return the partition of a new job: any, but for one idempotency key always the same."""
    if idempotency_key is None:
        return secrets.randbelow(num_partitions)
    return zlib.crc32(idempotency_key.encode()) % num_partitions
