"""What a worker's publishing and leases came to, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from inferq.runtime.histogram import Histogram

#: Bounds of the delay of a publish, in seconds.
DELAYS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
#: Bounds of an event's tokens; the terminal event may have none.
EVENT_TOKENS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)


@dataclass(slots=True)
class PublishBooks:
    """Calls by outcome (`ok`, `failed`), fenced writes by operation, and events that were taken."""

    calls: Counter[str] = field(default_factory=Counter)
    fenced: Counter[str] = field(default_factory=Counter)
    event_tokens: Histogram = field(default_factory=lambda: Histogram(EVENT_TOKENS))
    delay_s: Histogram = field(default_factory=lambda: Histogram(DELAYS_S))

    def published(self, first: int, events: Iterable[tuple[int, bytes]]) -> None:
        """Count events of one job by their totals of tokens, `first` before them."""
        for total, _ in events:
            self.event_tokens.observe(total - first)
            first = total
