"""Members of sorted sets by the server's time, put off to a later one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


async def postpone(redis: Any, *, key: str, ids: Sequence[str | bytes], ms: int) -> None:
    """Put members that are there off by `ms` milliseconds from now."""
    until = await now_ms(redis) + ms
    await redis.zadd(key, dict.fromkeys(ids, until), xx=True)


async def now_ms(redis: Any) -> int:
    """Return the server's time in milliseconds since 1970."""
    seconds, microseconds = await redis.time()
    return int(seconds * 1000 + microseconds // 1000)
