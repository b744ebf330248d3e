"""Counts of observed values by size: plain numbers for one thread, observed many at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """How many values were at most each of `bounds`, which rise; and their sum.

    One call observes any number of equal values, so that a batch of tokens costs one.
    """

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        #: Sum of all values.
        self.total = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[float, int]]:
        """Return how many values were at most each bound, the last of which is infinite."""
        rows, below = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            below += count
            rows.append((bound, below))
        return rows
