"""Workers' heartbeats, sweeping behind dead ones, and redriving dead letters."""

from __future__ import annotations

from typing import Any

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import GROUP, Lane
from inferq.protocol.messages import Job
from inferq.protocol.replies import JobState, Load


async def test_a_heartbeat_is_kept_with_the_servers_time(q: Any) -> None:
    reply = await q.scripts.register("pod-1", {"model": "größe", "blocks_free": 2**33})
    assert not reply.drain
    assert await q.scripts.workers() == {
        "pod-1": {"model": "größe", "blocks_free": 2**33, "t": reply.now_ms}
    }


async def test_a_worker_that_leaves_is_forgotten_at_once(q: Any) -> None:
    await q.scripts.register("a", {})
    await q.scripts.register("b", {})
    await q.scripts.unregister("a")
    await q.scripts.unregister("a")
    assert list(await q.scripts.workers()) == ["b"]


async def test_a_dead_worker_is_swept_only_after_its_jobs_were_taken_over(q: Any) -> None:
    await q.scripts.register("dead", {})
    job_id = await q.enqueue()
    await q.claim("dead")
    swept = await q.scripts.sweep(gone_ms=0)
    assert (swept.workers_removed, swept.consumers_removed) == (0, 0)
    await q.end_lease(job_id)
    [job] = (await q.claim("b")).claimed
    swept = await q.scripts.sweep(gone_ms=0)
    assert (swept.workers_removed, swept.consumers_removed) == (1, 1)
    assert await q.scripts.workers() == {}
    consumers = await q.redis.xinfo_consumers(q.keys.jobs(Lane.NORMAL), GROUP)
    assert [c["name"] for c in consumers] == [b"b"]
    await q.end("b", job)
    await q.assert_nothing_is_left()


async def test_a_worker_with_a_fresh_heartbeat_stays(q: Any) -> None:
    await q.enqueue()
    [job] = (await q.claim("idle")).claimed
    await q.end("idle", job)
    await q.scripts.register("idle", {})
    swept = await q.scripts.sweep(gone_ms=60_000)
    assert (swept.workers_removed, swept.consumers_removed) == (0, 0)
    assert list(await q.scripts.workers()) == ["idle"]


async def test_a_running_job_that_lost_its_lease_is_put_back(q: Any) -> None:
    ids = [await q.enqueue() for _ in range(25)]
    await q.claim("a")
    await q.redis.zrem(q.keys.leases, *ids[3:])
    put_back = 0
    for _ in range(5):
        put_back += (await q.scripts.sweep(gone_ms=60_000, limit=7)).jobs_put_back
    assert put_back == 22
    assert len((await q.claim("b")).claimed) == 22
    assert await q.scripts.load() == Load(running=25, prompt_tokens=250, budget_tokens=150)


async def test_a_pending_entry_of_a_job_that_is_no_more_is_removed(q: Any) -> None:
    job_id = await q.enqueue()
    await q.claim("a")
    await q.redis.delete(q.keys.job(job_id))
    await q.redis.zrem(q.keys.leases, job_id)
    swept = await q.scripts.sweep(gone_ms=60_000)
    assert swept.entries_removed == 1
    await q.scripts.sweep(gone_ms=60_000)
    await q.assert_nothing_is_left()  # and the counters are right again


async def test_sweeping_an_empty_queue_does_nothing(q: Any) -> None:
    swept = await q.scripts.sweep(gone_ms=0)
    assert swept == type(swept)(0, 0, 0, 0)


async def crash(q: Any, **options: Any) -> tuple[str, str]:
    """A job that became a dead letter: its id, and the letter's entry id."""
    job_id = await q.enqueue(**options)
    await q.claim("a")
    await q.end_lease(job_id)
    assert (await q.claim("b", max_crashes=1)).claimed == ()
    letter = (await q.scripts.dead_letters())[-1]
    assert letter.reason == "1 worker died or hung while it ran the job"
    return job_id, letter.entry_id


async def test_a_crashed_job_is_redriven_under_a_new_id(q: Any) -> None:
    old, entry = await crash(q, lane=Lane.LOW, prompt=33)
    new = await q.scripts.redrive(entry)
    assert new != old
    assert await q.scripts.dead_letters() == []
    [job] = (await q.claim("c")).claimed
    assert (job.job_id, job.lane, job.epoch, job.crashes) == (new, Lane.LOW, 1, 0)
    assert job.cost == 39
    assert Job.decode(job.payload).id == new
    assert (await q.scripts.status(old)).state is JobState.DONE
    assert len(await q.endings(old)) == 1
    await q.end("c", job)
    await q.assert_nothing_is_left()


async def test_a_dead_letter_is_redriven_once(q: Any) -> None:
    _, entry = await crash(q, budget=None)
    await q.scripts.redrive(entry)
    with pytest.raises(InvalidRequestError, match="no dead letter"):
        await q.scripts.redrive(entry)
    assert (await q.scripts.load()).queued == 1


async def test_an_undecodable_dead_letter_is_not_redriven(q: Any) -> None:
    await q.redis.xadd(q.keys.jobs(Lane.NORMAL), {"x": b"\xff"})
    await q.claim()
    [letter] = await q.scripts.dead_letters()
    with pytest.raises(InvalidRequestError, match="undecodable"):
        await q.scripts.redrive(letter.entry_id)
    assert await q.scripts.dead_letters(after=letter.entry_id) == []
    with pytest.raises(InvalidRequestError, match="entry_id"):
        await q.scripts.redrive("x")
