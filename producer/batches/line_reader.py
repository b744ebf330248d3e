"""Bytes to lines: of bounded length, each with its number and its place in the file."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

#: Longest line in bytes, without its end.
MAX_LINE_BYTES: Final = 2**20

_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line that is not blank; `data` is None where it is longer than `MAX_LINE_BYTES`.

    `number` counts all lines of the file from 1; `end` is the offset of the byte after the line.
    """

    number: int
    end: int
    data: bytes | None


class LineSplitter:
    """Cuts bytes that come in chunks into lines, and holds no more than one line and a chunk.

    `offset` and `number` say how many bytes and lines of the file came before.
    """

    def __init__(self, offset: int = 0, number: int = 0, *, limit: int = MAX_LINE_BYTES) -> None:
        self._offset = offset
        self._number = number
        self._limit = limit
        self._held = bytearray()
        self._is_too_long = False

    def feed(self, chunk: bytes) -> Iterator[InputLine]:
        """Yield the lines that a chunk ends."""
        start = 0
        while (found := chunk.find(b"\n", start)) >= 0:
            self._hold(chunk[start:found])
            self._offset += 1
            start = found + 1
            yield from self._line()
        self._hold(chunk[start:])

    def end(self) -> Iterator[InputLine]:
        """Yield the last line, if the file does not end with a line's end."""
        if self._held or self._is_too_long:
            yield from self._line()

    def _hold(self, piece: bytes) -> None:
        self._offset += len(piece)
        # one more for the carriage return, and the mark that may begin a file
        if len(self._held) + len(piece) > self._limit + 1 + len(_MARK):
            self._is_too_long = True
            self._held.clear()
        elif not self._is_too_long:
            self._held += piece

    def _line(self) -> Iterator[InputLine]:
        self._number += 1
        data = bytes(self._held).removesuffix(b"\r")
        if self._number == 1:
            data = data.removeprefix(_MARK)
        is_too_long = self._is_too_long or len(data) > self._limit
        self._held.clear()
        self._is_too_long = False
        if is_too_long:
            yield InputLine(self._number, self._offset, None)
        elif data.strip():
            yield InputLine(self._number, self._offset, data)


async def read_lines(
    chunks: AsyncGenerator[bytes], offset: int = 0, number: int = 0
) -> AsyncGenerator[InputLine]:
    """Yield the lines of a file whose bytes from `offset` on come in chunks; closes these."""
    splitter = LineSplitter(offset, number)
    async with aclosing(chunks):
        async for chunk in chunks:
            for line in splitter.feed(chunk):
                yield line
    for line in splitter.end():
        yield line
