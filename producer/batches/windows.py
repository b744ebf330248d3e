"""What of a file is under way: how much, and up to where everything has ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from inferq.producer.batches.line_reader import InputLine


class Window:
    """Bounds what is under way by number and by weight; one task at a time may wait for room."""

    def __init__(self, *, most: int, weight: int) -> None:
        self._most = most
        self._weight = weight
        self._number = 0
        self._held = 0
        self._changed = asyncio.Event()

    async def enter(self, weight: int) -> None:
        """Wait for room; what is alone always has it."""
        while self._number and (self._number >= self._most or self._held + weight > self._weight):
            self._changed.clear()
            await self._changed.wait()
        self._number += 1
        self._held += weight

    def leave(self, weight: int) -> None:
        """Make room again."""
        self._number -= 1
        self._held -= weight
        self._changed.set()


@dataclass(frozen=True, slots=True)
class Position:
    """Up to where a file has ended: the first `offset` bytes, `line` lines, and `done` after it."""

    offset: int = 0
    line: int = 0
    done: tuple[int, ...] = ()


class Tracker:
    """Follows which lines have ended, in whatever order they do."""

    def __init__(self, start: Position) -> None:
        self._offset = start.offset
        self._line = start.line
        self._done = set(start.done)
        #: In the order of the file: where each line ends.
        self._ends: dict[int, int] = {}
        self._advanced = asyncio.Event()

    @property
    def position(self) -> Position:
        """Where the file stands now."""
        return Position(self._offset, self._line, tuple(sorted(self._done)))

    @property
    def span(self) -> int:
        """Lines that came after the first that has not ended."""
        return len(self._ends)

    def start(self, line: InputLine) -> bool:
        """Take the next line; false if it has ended in an earlier run."""
        self._ends[line.number] = line.end
        if line.number not in self._done:
            return True
        self._advance()
        return False

    def finish(self, number: int) -> None:
        """Note the end of a line."""
        self._done.add(number)
        self._advance()

    async def wait_for_span(self, most: int) -> None:
        """Wait until no more than so many lines came after the first that has not ended."""
        while self.span > most:
            self._advanced.clear()
            await self._advanced.wait()

    def _advance(self) -> None:
        while self._ends:
            number = next(iter(self._ends))
            if number not in self._done:
                return
            self._done.remove(number)
            self._offset = self._ends.pop(number)
            self._line = number
            self._advanced.set()
