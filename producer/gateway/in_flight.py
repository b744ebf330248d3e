"""What this process is busy with: how much at most, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from inferq.producer.gateway.errors import SERVER, HttpError, retry_after


class InFlight:
    """The requests that wait for tokens, streams included.

    The end comes in two steps: `is_ending`, from which on no new requests should be sent here; then
    `closing`, at which streams say goodbye and end, so that their clients resume elsewhere.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._number = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_ending = False
        self.closing = asyncio.Event()

    def __len__(self) -> int:
        return self._number

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Count one request, from its submission to the last byte of its answer.

        Raises a 503 when there are too many, or the process is about to end.
        """
        if self.closing.is_set():
            raise _overloaded("This gateway is shutting down. Try again.")
        if self._number >= self._limit:
            raise _overloaded(f"This gateway serves {self._limit} requests already. Try again.")
        self._number += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._number -= 1
            if not self._number:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no request is left."""
        await self._idle.wait()


def _overloaded(message: str) -> HttpError:
    return HttpError(503, message, type=SERVER, code="overloaded", headers=retry_after(1))
