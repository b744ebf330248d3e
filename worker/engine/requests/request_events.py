"""What happens to a request between its steps, for whoever follows that request."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from inferq.worker.engine.requests.sequence import Sequence


class EventKind(StrEnum):
    """What can happen to a sequence."""

    #: It runs, for the first time or again.
    RUNNING = "running"
    #: It gave its blocks away, and will be computed again.
    DROPPED = "dropped"
    #: Its blocks are moved to host memory.
    SWAPPED = "swapped"


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """What happened to one output of a request, at a time in seconds since 1970."""

    request_id: str
    index: int
    kind: EventKind
    at: float


class RequestEvents:
    """Collects the events of traced requests; those of others cost a look at a flag."""

    def __init__(self) -> None:
        self._events: list[RequestEvent] = []

    def note(self, kind: EventKind, sequences: Iterable[Sequence]) -> None:
        """Record that something happened to sequences just now."""
        for sequence in sequences:
            if sequence.group.is_traced:
                self._events.append(
                    RequestEvent(sequence.request_id, sequence.child_index, kind, time.time())
                )

    def take(self) -> list[RequestEvent]:
        """Return the events since the last call."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return events
