"""One follower of one job's events, between a shared reader and whoever iterates."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Self

from inferq.protocol.errors import JobError

#: Most events waiting in the buffer of one stream; one read brings at most half of them.
BUFFER_EVENTS: Final = 128
#: Bytes in the buffer above which no more are read.
BUFFER_BYTES: Final = 2**21


class Entry(NamedTuple):
    """One entry of a job's stream: tokens published with it, whether it is the last, the event."""

    total: int
    is_terminal: bool
    payload: bytes

    @classmethod
    def from_redis(cls, entry_id: bytes, fields: dict[bytes, bytes]) -> Self:
        """Read the entry `<total>-<0, or 1 when terminal>` with its one field."""
        total, _, end = entry_id.partition(b"-")
        return cls(int(total), end != b"0", fields.get(b"e", b""))

    @property
    def position(self) -> tuple[int, int]:
        """The entry's id, as it compares."""
        return self.total, int(self.is_terminal)


class Subscription:
    """A cursor, a bounded buffer, and how it ended."""

    def __init__(self, job_id: str, from_total: int) -> None:
        self.job_id = job_id
        self.cursor = (from_total, 0)
        #: When to look after the job if nothing comes before, on the loop's clock.
        self.probe_at = 0.0
        #: When the job's deadline may have come, on the loop's clock; 0 while it is not known.
        self.deadline = 0.0
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._error: Exception | None = None
        self._is_complete = False
        self._is_closed = False
        self._changed = asyncio.Event()
        self._on_room: Callable[[], Any] | None = None
        self._on_close: Callable[[Subscription], Any] | None = None

    @property
    def wants_events(self) -> bool:
        """Whether there is room for all that one read may bring."""
        has_room = len(self._entries) <= BUFFER_EVENTS // 2 and self._bytes <= BUFFER_BYTES
        return has_room and not self._is_complete

    async def get(self) -> Entry | None:
        """Return the next entry, waiting for it; None once closed; raise what else ended it."""
        while not self._entries:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._pop()

    def get_nowait(self) -> Entry | None:
        """Return the next entry if it is there."""
        return self._pop() if self._entries else None

    def attach(self, on_room: Callable[[], Any], on_close: Callable[[Subscription], Any]) -> None:
        """Name whom to tell when there is room again, and when nobody follows any more."""
        self._on_room, self._on_close = on_room, on_close

    def close(self) -> None:
        """Stop following, and let go who waits; what is in the buffer is dropped."""
        self._is_closed = self._is_complete = True
        if self._on_close is not None:
            self._on_close(self)
        self._on_room = self._on_close = None
        self._entries.clear()
        self._changed.set()

    def push(self, entry: Entry) -> bool:
        """Take an entry unless it was seen or there is no room (then it is read again later)."""
        is_new = entry.position > self.cursor and not self._is_complete
        if is_new and len(self._entries) < BUFFER_EVENTS and self._bytes <= BUFFER_BYTES:
            self._append(entry)
            return True
        return False

    def end_early(self, entry: Entry) -> None:
        """Take the terminal entry although it lies before the cursor."""
        if not self._is_complete:
            self._append(entry)

    def fail(self, error: Exception) -> None:
        """End the subscription with an error, raised after the entries already there."""
        if not self._is_complete:
            self._error = error
            self._is_complete = True
            self._changed.set()

    def refuse(self, reason: Exception) -> None:
        """End the subscription because the server cannot read its job, whatever it does else."""
        error = JobError(self.job_id, f"job {self.job_id} cannot be read: {reason}")
        error.__cause__ = reason
        self.fail(error)

    def _pop(self) -> Entry:
        was_paused = not self.wants_events
        entry = self._entries.popleft()
        self._bytes -= len(entry.payload)
        if was_paused and self.wants_events and self._on_room is not None:
            self._on_room()
        return entry

    def _append(self, entry: Entry) -> None:
        self.cursor = entry.position
        self._is_complete = entry.is_terminal
        self._entries.append(entry)
        self._bytes += len(entry.payload)
        self._changed.set()
