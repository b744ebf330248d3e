"""A queue's last minutes: one sample after another, the oldest forgotten."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from inferq.protocol.keys import Lane
from inferq.protocol.replies import QueueOverview

#: Seconds between two samples, and for how long they are kept.
SAMPLE_S: Final = 2.0
KEPT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A queue at one time: `waiting` by lane, `taken` by workers, rates in tokens per second."""

    time_ms: int
    waiting: tuple[int, ...]
    taken: int
    prompt_rate: float
    generated_rate: float


class History:
    """The samples of the last ten minutes, by the server's clock."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def add(self, overview: QueueOverview, *, prompt_rate: float, generated_rate: float) -> None:
        """Add what was seen; forget what is too old, or from before the clock was set back."""
        sample = Sample(
            time_ms=overview.time_ms,
            waiting=tuple(overview.lanes[lane].waiting for lane in Lane),
            taken=sum(each.taken for each in overview.lanes.values()),
            prompt_rate=prompt_rate,
            generated_rate=generated_rate,
        )
        while self._samples and self._samples[-1].time_ms >= sample.time_ms:
            self._samples.pop()
        self._samples.append(sample)
        while self._samples[0].time_ms < sample.time_ms - KEPT_S * 1000:
            self._samples.popleft()

    def columns(self) -> dict[str, list[int] | list[float]]:
        """Return each series by name, all of one length; `time` in s since 1970."""
        samples = self._samples
        lanes = {lane.value: [s.waiting[i] for s in samples] for i, lane in enumerate(Lane)}
        return {
            "time": [s.time_ms / 1000 for s in samples],
            **lanes,
            "taken": [s.taken for s in samples],
            "prompt": [s.prompt_rate for s in samples],
            "generated": [s.generated_rate for s in samples],
        }
