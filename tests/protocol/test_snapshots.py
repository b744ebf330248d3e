"""Snapshots of workers' blocks: who is told to write them, how long they live, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq.protocol.errors import DecodeError
from inferq.protocol.snapshots import BlockSnapshot, HoldingSequence, short_id
from inferq.protocol.watching import mark_watched, read_snapshot, write_snapshot
from inferq.protocol.wire import pack

SNAPSHOT = BlockSnapshot(
    num_blocks=6,
    num_host_blocks=3,
    runs=[2, 3, 2, 0, 1, 2, 1, 1, 1, 1, 0, 0, 3, 0, 0, 0, 2, 4, 1, 2],
    sequences=[
        HoldingSequence("00aa11", 0, 40),
        HoldingSequence("00aa11", 1, 41),
        HoldingSequence("22bb33", 0, 7),
    ],
)


async def test_workers_learn_at_their_next_heartbeat_that_somebody_looks(q: Any) -> None:
    assert not (await q.scripts.register("a", {})).watched
    await mark_watched(q.redis, q.keys)
    assert (await q.scripts.register("a", {})).watched
    assert (await q.scripts.register("b", {})).watched
    assert 0 < await q.redis.pttl(q.keys.watch) <= 10_000


async def test_a_snapshot_is_read_as_it_was_written_and_goes_by_itself(q: Any) -> None:
    assert await read_snapshot(q.redis, q.keys, "a") is None
    await write_snapshot(q.redis, q.keys, "a", SNAPSHOT.encode(), lives_ms=5_000)
    assert await read_snapshot(q.redis, q.keys, "a") == SNAPSHOT
    assert 0 < await q.redis.pttl(q.keys.blocks("a")) <= 5_000
    assert await read_snapshot(q.redis, q.keys, "b") is None


def test_blocks_are_counted_by_what_they_are_and_free_ones_on_the_device_only() -> None:
    assert SNAPSHOT.counts() == {"free": 2, "cached": 1, "used": 1, "shared": 2, "swapped": 2}


def test_a_job_is_told_by_the_end_of_its_random_digits() -> None:
    assert short_id("0190a1b2c3d4e5f60718293a4b5c6d7e-17:3") == "5c6d7e"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"b": 7}, "do not cover"),
        ({"b": "6"}, "b must be int"),
        ({"r": [9, 5, 0, 0]}, "a state that there is not"),
        ({"r": [9, 2, 1, 3]}, "a sequence that there is not"),
        ({"r": [9, 2, 1]}, "four counts"),
        ({"r": [9, 2, 1, -1]}, "four counts"),
        ({"r": [9, 2, 1, "0"]}, "four counts"),
        ({"r": [9, 2, True, 0]}, "four counts"),
        ({"s": [["x", 0]]}, "not enough values"),
        ({"s": [["x", 0, "7"]]}, "no sequence"),
        ({"s": [7]}, "cannot unpack"),
    ],
)
def test_what_is_no_snapshot_is_refused(change: dict[str, Any], why: str) -> None:
    wire = {"b": 6, "h": 3, "r": list(SNAPSHOT.runs), "s": [["a", 0, 1]] * 3}
    assert BlockSnapshot.decode(pack(wire | {"later": "added"})).num_blocks == 6
    with pytest.raises(DecodeError, match=why):
        BlockSnapshot.decode(pack(wire | change))


_anything = st.recursive(st.integers(-3, 9) | st.text(max_size=2) | st.none(), st.lists)


@given(st.dictionaries(st.sampled_from("bhrs"), _anything).map(pack) | st.binary(max_size=50))
def test_whatever_stands_there_is_a_whole_snapshot_or_a_decode_error(payload: bytes) -> None:
    try:
        snapshot = BlockSnapshot.decode(payload)
    except DecodeError:
        return
    counts = snapshot.counts()
    assert sum(counts.values()) == snapshot.num_blocks + counts["swapped"]
