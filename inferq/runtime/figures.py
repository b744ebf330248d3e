"""Figures read from a server when somebody asks: seldom, within a time, and never old ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, Generic, TypeVar

import structlog

from inferq.protocol.errors import InferqError

logger = structlog.get_logger("inferq.metrics")

#: Seconds for which what was read, or was not, stands.
STANDS_S: Final = 3.0
#: Seconds that one reading may take.
TIMEOUT_S: Final = 2.0

T = TypeVar("T")


class Figures(Generic[T]):
    """What `read(name)` returned for each of `names` at the last `refresh`.

    A name whose reading failed is not in `current`, rather than with what it was before.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], Awaitable[T]]) -> None:
        self.names = tuple(names)
        self.current: Mapping[str, T] = {}
        self._read = read
        self._read_at: float | None = None
        self._reading = asyncio.Lock()
        self._lost: frozenset[str] = frozenset()

    async def refresh(self) -> None:
        """Read again, unless that was done in the last seconds."""
        async with self._reading:
            if self._read_at is not None and time.monotonic() < self._read_at + STANDS_S:
                return
            found = await asyncio.gather(*map(self._read_one, self.names))
            self.current = {name: value for name, value in found if value is not None}
            self._lost = frozenset(self.names) - self.current.keys()
            self._read_at = time.monotonic()

    async def _read_one(self, name: str) -> tuple[str, T | None]:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return name, await self._read(name)
        except (InferqError, TimeoutError) as error:
            if name not in self._lost:
                why = str(error) or f"no answer within {TIMEOUT_S:g} s"
                logger.warning("figures not read", queue=name, error=why)
            return name, None
