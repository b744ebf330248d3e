"""How fast a queue drains, measured by how many of its jobs ever ended."""

from __future__ import annotations

from collections import deque
from typing import Final

#: Seconds over which the rate is taken.
WINDOW_S: Final = 60.0


class DrainRate:
    """Jobs that leave a queue per second, over the last minute."""

    def __init__(self) -> None:
        self._notes: deque[tuple[float, int]] = deque()

    def note(self, finished_total: int, now_s: float) -> None:
        """Take note of how many jobs had ended; fewer than before means another server."""
        if self._notes and finished_total < self._notes[-1][1]:
            self._notes.clear()
        self._notes.append((now_s, finished_total))
        while len(self._notes) > 2 and self._notes[1][0] <= now_s - WINDOW_S:
            self._notes.popleft()

    def seconds_for(self, jobs: int) -> float | None:
        """Return how long so many jobs take to leave; None while nothing is seen to leave."""
        if len(self._notes) < 2:
            return None
        (started, first), (ended, last) = self._notes[0], self._notes[-1]
        if last == first or ended <= started:
            return None
        return max(1, jobs) * (ended - started) / (last - first)
