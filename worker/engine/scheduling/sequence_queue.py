"""Sequences kept in the order in which they are served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from inferq.worker.engine.requests.sequence import Sequence

_order = attrgetter("order")


class SequenceQueue:
    """Sequences sorted by `order`; adding and removing cost O(log n) comparisons."""

    __slots__ = ("_sequences",)

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    def __contains__(self, sequence: Sequence) -> bool:
        index = bisect_left(self._sequences, sequence.order, key=_order)
        return self._sequences[index : index + 1] == [sequence]

    @property
    def first(self) -> Sequence:
        """The next to be served; raise `IndexError` when empty."""
        return self._sequences[0]

    @property
    def last(self) -> Sequence:
        """The first to give way; raise `IndexError` when empty."""
        return self._sequences[-1]

    def add(self, sequence: Sequence) -> None:
        """Put `sequence` in its place."""
        insort(self._sequences, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Take `sequence` out; raise `LookupError` if it is not here."""
        index = bisect_left(self._sequences, sequence.order, key=_order)
        if sequence not in self:
            raise LookupError(f"{sequence!r} is not in this queue")
        del self._sequences[index]
