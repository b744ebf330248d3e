"""Bytes to lines, and how far a file has come whatever the order in which its lines end."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq.producer.batches import surveys
from inferq.producer.batches.answering import Ending
from inferq.producer.batches.line_reader import MAX_LINE_BYTES, InputLine, LineSplitter, read_lines
from inferq.producer.batches.outcomes import encode_outcome
from inferq.producer.batches.parts import Gathered
from inferq.producer.batches.records import Terms
from inferq.producer.batches.surveys import SurveyFailed, survey
from inferq.producer.batches.windows import Position, Tracker, Window


def split(data: bytes, size: int, *, limit: int = MAX_LINE_BYTES) -> list[InputLine]:
    splitter = LineSplitter(limit=limit)
    lines = []
    for start in range(0, len(data), size):
        lines += splitter.feed(data[start : start + size])
    return [*lines, *splitter.end()]


@given(
    st.lists(st.sampled_from([b"", b" ", b"a", b"bcd", b"\r", b"\xff", b"12345678"]), max_size=12),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([b"\n", b"\r\n"]),
)
def test_lines_are_the_same_however_the_bytes_come(
    rows: list[bytes], size: int, has_end: bool, end: bytes
) -> None:
    data = end.join(rows) + (end if has_end else b"")
    found = split(data, size)
    assert found == split(data, len(data) or 1)
    whole = data.split(b"\n")
    wanted = [
        (number, row.removesuffix(b"\r"))
        for number, row in enumerate(whole, start=1)
        if row.strip()
    ]
    assert [(line.number, line.data) for line in found] == wanted
    for line in found:
        assert data[: line.end].count(b"\n") == line.number - (not data[: line.end].endswith(b"\n"))


@given(st.binary(max_size=60), st.integers(1, 7), st.integers(0, 60))
def test_reading_goes_on_after_any_line(data: bytes, size: int, skipped: int) -> None:
    found = split(data, size, limit=10)
    for place, line in enumerate(found[:skipped], start=1):
        splitter = LineSplitter(line.end, line.number, limit=10)
        rest = [*splitter.feed(data[line.end :]), *splitter.end()]
        assert rest == found[place:]


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_line_may_be_as_long_as_the_limit_and_no_longer(
    extra: int, end: bytes, mark: bytes
) -> None:
    row = b"x" * (8 + extra)
    [line] = split(mark + row + end, 3, limit=8)
    assert line.data == (None if extra else row)
    assert line.end == len(mark + row + end)


def test_a_huge_line_is_not_held() -> None:
    splitter = LineSplitter()
    for _ in range(64):
        assert list(splitter.feed(b"x" * 2**20)) == []
        assert len(splitter._held) <= MAX_LINE_BYTES + 4
    [line] = splitter.feed(b"\n")
    assert (line.data, line.end) == (None, 64 * 2**20 + 1)
    [after] = splitter.feed(b"after\n")
    assert (after.number, after.data) == (2, b"after")


def test_a_position_tells_what_has_ended_and_no_more() -> None:
    chance = random.Random(5)
    lines = [InputLine(number, number * 10, b"x") for number in range(1, 41)]
    ended: set[int] = set()
    position = Position()
    while len(ended) < len(lines):
        tracker = Tracker(position)
        rest = [line for line in lines if line.number > position.line]
        begun = [line for line in rest[: chance.randrange(1, 12)] if tracker.start(line)]
        for line in chance.sample(begun, chance.randrange(len(begun) + 1)):
            tracker.finish(line.number)
            ended.add(line.number)
        position = tracker.position
        assert {*range(1, position.line + 1), *position.done} == ended
        assert position.offset == position.line * 10
    assert position == Position(400, 40)


async def test_a_window_has_room_for_so_many_and_for_so_much() -> None:
    window = Window(most=2, weight=10)
    await window.enter(100)  # alone, it may be as heavy as it is
    second = asyncio.create_task(window.enter(1))
    await asyncio.sleep(0)
    assert not second.done()
    window.leave(100)
    await second
    await window.enter(9)
    third = asyncio.create_task(window.enter(0))
    await asyncio.sleep(0)
    assert not third.done()
    window.leave(1)
    await third


class Source:
    """Chunks without end, which tells whether its reader has closed it."""

    def __init__(self, chunk: bytes) -> None:
        self.is_closed = False
        self._chunk = chunk

    async def chunks(self) -> AsyncGenerator[bytes]:
        try:
            while True:
                yield self._chunk
        finally:
            self.is_closed = True


async def test_what_lines_are_read_from_is_closed_with_them() -> None:
    source = Source(b"a\nb\n")
    async with aclosing(read_lines(source.chunks())) as lines:
        assert (await anext(lines)).data == b"a"
        assert not source.is_closed
    assert source.is_closed


async def test_a_survey_that_fails_closes_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveys, "MAX_LINES", 5)
    source = Source(b"{}\n")
    with pytest.raises(SurveyFailed, match="more than 5 lines"):
        await survey(source.chunks(), endpoint=None, terms=Terms(queues=("chat",)))
    assert source.is_closed


def test_lines_that_have_ended_take_the_memory_that_they_are_counted_with() -> None:
    gathered = Gathered()
    tracemalloc.start()
    try:
        for number in range(2000):
            entry = encode_outcome("batch_a", number, f"line-{number}", Ending.EXPIRED.outcome())
            gathered.add(entry, is_success=False, job_ids=())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert gathered.num_lines == 2000
    assert 100_000 < gathered.size <= held < 2 * gathered.size
