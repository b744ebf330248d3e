"""What operators ask of a queue: what it holds, to drain a worker, what became of dead letters."""

from __future__ import annotations

from typing import Any

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import Lane
from inferq.protocol.replies import LaneOverview, Load, QueueOverview

NOTHING = LaneOverview(waiting=0, taken=0, oldest_ms=None)


async def test_an_empty_queue_holds_nothing(q: Any) -> None:
    overview = await q.scripts.overview()
    assert overview.lanes == dict.fromkeys(Lane, NOTHING)
    assert (overview.load, overview.left_behind, overview.dead_letters) == (Load(), 0, 0)


async def test_an_overview_counts_each_lane_and_finds_its_oldest_job(q: Any) -> None:
    await q.enqueue(lane=Lane.HIGH)
    await q.claim("a")
    for _ in range(3):
        await q.enqueue(lane=Lane.NORMAL)
    await q.enqueue(lane=Lane.LOW, delay_ms=60_000)
    overview = await q.scripts.overview()
    assert overview.lanes[Lane.HIGH] == LaneOverview(waiting=0, taken=1, oldest_ms=None)
    normal = overview.lanes[Lane.NORMAL]
    assert (normal.waiting, normal.taken) == (3, 0)
    [(first, _)] = await q.redis.xrange(q.keys.jobs(Lane.NORMAL), count=1)
    assert normal.oldest_ms == overview.time_ms - int(first.split(b"-")[0])
    assert overview.lanes[Lane.LOW] == NOTHING
    assert overview.load == Load(queued=3, running=1, delayed=1, prompt_tokens=50, budget_tokens=30)


async def test_a_job_whose_lease_ended_counts_as_left_behind(q: Any) -> None:
    job_id = await q.enqueue()
    await q.claim("a")
    assert (await q.scripts.overview()).left_behind == 0
    await q.end_lease(job_id)
    assert (await q.scripts.overview()).left_behind == 1


def test_partitions_are_joined_by_their_sums_and_the_longest_wait() -> None:
    def holding(waiting: int, oldest_ms: int | None) -> QueueOverview:
        lane = LaneOverview(waiting, 1, oldest_ms)
        return QueueOverview(5, dict.fromkeys(Lane, lane), Load(waiting, 1, 0, 10, 20), 1, 2)

    joined = holding(2, 700).joined(holding(3, None))
    assert joined.lanes[Lane.LOW] == LaneOverview(waiting=5, taken=2, oldest_ms=700)
    assert joined.load == Load(5, 2, 0, 20, 40)
    assert (joined.left_behind, joined.dead_letters) == (2, 4)


async def test_a_worker_learns_at_its_next_heartbeat_that_it_shall_drain(q: Any) -> None:
    await q.scripts.register("a", {})
    await q.scripts.register("b", {})
    assert await q.scripts.drain("a")
    assert (await q.scripts.register("a", {})).drain
    assert not (await q.scripts.register("b", {})).drain


async def test_a_wish_to_drain_ends_with_its_worker(q: Any) -> None:
    await q.scripts.register("a", {})
    await q.scripts.drain("a")
    assert 0 < await q.redis.pttl(q.keys.drain("a")) <= 600_000
    await q.scripts.unregister("a")
    assert not (await q.scripts.register("a", {})).drain


async def test_a_worker_that_is_not_known_cannot_be_drained(q: Any) -> None:
    assert not await q.scripts.drain("nobody")
    assert not await q.redis.exists(q.keys.drain("nobody"))


async def _crash(q: Any) -> str:
    job_id: str = await q.enqueue()
    for _ in range(3):
        await q.claim("a", idle=True)
        await q.end_lease(job_id)
    await q.claim("a", idle=True)
    return job_id


async def test_a_dead_letter_can_be_read_and_dropped_by_its_id(q: Any) -> None:
    job_id = await _crash(q)
    [letter] = await q.scripts.dead_letters()
    assert await q.scripts.dead_letter(letter.entry_id) == letter
    assert letter.job_id == job_id
    assert await q.scripts.drop_dead_letter(letter.entry_id)
    assert not await q.scripts.drop_dead_letter(letter.entry_id)
    assert (await q.scripts.overview()).dead_letters == 0
    with pytest.raises(InvalidRequestError, match="no dead letter"):
        await q.scripts.dead_letter(letter.entry_id)


@pytest.mark.parametrize("entry_id", ["", "x", "1", "1-", "-", "+", "1-1-1"])
async def test_an_id_that_is_no_entry_id_is_refused(q: Any, entry_id: str) -> None:
    for ask in (q.scripts.dead_letter, q.scripts.drop_dead_letter, q.scripts.redrive):
        with pytest.raises(InvalidRequestError, match="entry_id"):
            await ask(entry_id)


async def test_a_worker_hears_that_another_process_has_its_name(q: Any) -> None:
    for process, contested in (("p", False), ("p", False), ("r", True), ("p", True), ("p", False)):
        reply = await q.scripts.register("w", {"process": process})
        assert reply.contested is contested
    await q.scripts.register("w", {})  # of a version that does not say
    assert not (await q.scripts.register("w", {"process": "p"})).contested
    await q.redis.hset(q.keys.workers, "w", b"\xc1 no map")
    assert not (await q.scripts.register("w", {"process": "p"})).contested
