"""Claiming: what fits, in a fair order, and nothing that is over."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from inferq.protocol.keys import GROUP, Lane, new_job_id
from inferq.protocol.messages import FinishReason, Job
from inferq.protocol.replies import DeadLetterKind, JobState, Load


async def server_ms(q: Any) -> int:
    seconds, microseconds = await q.redis.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


async def test_a_claimed_job_comes_whole_and_is_leased(q: Any) -> None:
    job_id = await q.enqueue(deadline_ms=50_000)
    ready_ms = await server_ms(q) - 5_000  # waits for 5 s already
    await q.redis.hset(q.keys.job(job_id), "ready", ready_ms)
    reply = await q.claim()
    [job] = reply.claimed
    assert (job.job_id, job.lane, job.epoch, job.cost) == (job_id, Lane.NORMAL, 1, 16)
    assert (job.published, job.attempts, job.crashes) == (0, 1, 0)
    assert Job.decode(job.payload).id == job_id
    assert 0 < job.deadline_in_ms <= 50_000
    assert 5_000 <= job.queued_ms <= await server_ms(q) - ready_ms
    status = await q.scripts.status(job_id)
    assert (status.state, status.owner) == (JobState.RUNNING, "a")
    assert 0 < reply.next_due_ms <= 30_000
    assert not reply.waiting
    assert await q.scripts.load() == Load(running=1, prompt_tokens=10, budget_tokens=6)
    assert await q.pending("a") == 1


async def test_an_empty_queue_gives_nothing_and_ids_to_wait_after(q: Any) -> None:
    reply = await q.claim()
    assert reply.claimed == ()
    assert reply.next_due_ms is None
    assert not reply.waiting
    assert reply.lane_tails == dict.fromkeys((Lane.HIGH, Lane.NORMAL, Lane.LOW), "0-0")


async def test_the_tails_wake_a_reader_for_new_entries_only(q: Any) -> None:
    await q.enqueue()
    await q.enqueue(lane=Lane.LOW)
    reply = await q.claim()
    assert not reply.waiting
    streams = {q.keys.jobs(lane): tail for lane, tail in reply.lane_tails.items()}
    assert not await q.redis.xread(streams)
    await q.enqueue()
    assert len(await q.redis.xread(streams)) == 1


async def test_there_is_no_tail_where_an_arrival_changes_nothing(q: Any) -> None:
    await q.enqueue(prompt=500)
    reply = await q.claim(free=64)
    assert [lane for lane, tail in reply.lane_tails.items() if tail] == [Lane.HIGH, Lane.LOW]
    held_up = await q.claim(free=64, starve_ms=0)
    assert not held_up.lane_tails[Lane.LOW]
    full = await q.claim(max_jobs=1)
    assert len(full.claimed) == 1
    assert not full.lane_tails[Lane.LOW]


async def test_a_worker_claims_only_what_fits_and_the_other_takes_the_rest(q: Any) -> None:
    for _ in range(20):
        await q.enqueue(prompt=50, budget=50)  # 7 blocks of 16
    first = await q.claim("a", free=4 * 112, idle=True)
    assert len(first.claimed) == 4
    assert first.waiting
    assert await q.pending("a") == 4
    again = await q.claim("a", free=0)
    assert again.claimed == ()
    assert again.waiting
    second = await q.claim("b", free=16 * 112)
    assert len(second.claimed) == 16
    assert await q.pending("a") == 4


async def test_whole_blocks_count(q: Any) -> None:
    await q.enqueue(prompt=17, budget=0)
    assert (await q.claim(free=31)).claimed == ()
    assert len((await q.claim(free=32)).claimed) == 1


async def test_no_job_counts_as_larger_than_the_context(q: Any) -> None:
    await q.enqueue(prompt=10, budget=None)
    assert (await q.claim(free=1007, max_model_len=1000)).claimed == ()
    assert len((await q.claim(free=1008, max_model_len=1000)).claimed) == 1


async def test_an_idle_worker_takes_one_job_whatever_its_bound(q: Any) -> None:
    await q.enqueue(prompt=900, budget=50)
    await q.enqueue(prompt=1, budget=1)
    reply = await q.claim(free=160, idle=True)
    assert len(reply.claimed) == 1
    assert reply.claimed[0].cost == 950


async def test_a_lane_is_first_in_first_out(q: Any) -> None:
    ids = [await q.enqueue() for _ in range(10)]
    assert [j.job_id for j in (await q.claim(max_jobs=4)).claimed] == ids[:4]
    assert [j.job_id for j in (await q.claim()).claimed] == ids[4:]


async def test_a_big_job_at_the_head_holds_up_its_own_lane_only(q: Any) -> None:
    big = await q.enqueue(prompt=500, budget=500, lane=Lane.HIGH)
    small = await q.enqueue(lane=Lane.HIGH)
    other = await q.enqueue(lane=Lane.LOW)
    reply = await q.claim("a", free=64)
    assert [j.job_id for j in reply.claimed] == [other]
    assert reply.waiting
    assert [j.job_id for j in (await q.claim("b", free=1024)).claimed] == [big, small]


async def test_a_big_job_is_not_starved_by_smaller_ones(q: Any) -> None:
    big = await q.enqueue(prompt=500, budget=500, lane=Lane.NORMAL)
    for _ in range(3):
        await q.enqueue(lane=Lane.HIGH)
    assert len((await q.claim(free=64, max_jobs=1, starve_ms=60_000)).claimed) == 1
    assert len((await q.claim(free=64, max_jobs=1, starve_ms=60_000)).claimed) == 1
    held = await q.claim(free=64, max_jobs=1, starve_ms=0)
    assert held.claimed == ()
    assert held.waiting
    assert (await q.claim(free=1008, starve_ms=0)).claimed[0].job_id == big


async def test_a_blocked_job_that_is_cancelled_frees_its_lane(q: Any) -> None:
    big = await q.enqueue(prompt=500, budget=500)
    small = await q.enqueue()
    assert (await q.claim(free=64)).claimed == ()
    await q.cancel(big)
    assert [j.job_id for j in (await q.claim(free=64, starve_ms=0)).claimed] == [small]


async def test_lanes_share_by_weight_while_all_have_work(q: Any) -> None:
    for lane in (Lane.HIGH, Lane.NORMAL, Lane.LOW):
        for _ in range(64):
            await q.enqueue(lane=lane)
    lanes = Counter(j.lane for j in (await q.claim(max_jobs=63)).claimed)
    assert lanes == {Lane.HIGH: 48, Lane.NORMAL: 12, Lane.LOW: 3}


async def test_ten_low_jobs_finish_under_a_steady_flood_of_high_ones(q: Any) -> None:
    low = {await q.enqueue(lane=Lane.LOW) for _ in range(10)}
    claims = 0
    while low:
        for _ in range(4):
            await q.enqueue(lane=Lane.HIGH)
        for job in (await q.claim(max_jobs=4)).claimed:
            low.discard(job.job_id)
            await q.end("a", job)
        claims += 1
        assert claims <= 50  # 10 jobs at one in 17, four a claim: 43


async def test_a_lane_that_was_empty_does_not_burst(q: Any) -> None:
    for _ in range(100):
        await q.enqueue(lane=Lane.HIGH)
    await q.claim(max_jobs=80)
    for _ in range(20):
        await q.enqueue(lane=Lane.LOW)
    lanes = Counter(j.lane for j in (await q.claim(max_jobs=17)).claimed)
    assert lanes[Lane.LOW] <= 2


async def test_a_deadline_that_passed_in_the_queue_gives_one_expired_event(q: Any) -> None:
    job_id = await q.enqueue(deadline_ms=5_000)
    later = await q.enqueue()
    await q.pass_deadline(job_id)
    assert [j.job_id for j in (await q.claim()).claimed] == [later]
    [end] = await q.endings(job_id)
    assert end.finish_reason is FinishReason.EXPIRED
    status = await q.scripts.status(job_id)
    assert (status.state, status.finish_reason) == (JobState.DONE, FinishReason.EXPIRED)
    assert await q.redis.xlen(q.keys.jobs(Lane.NORMAL)) == 1


async def test_a_deadline_that_passed_while_delayed_gives_one_expired_event(q: Any) -> None:
    job_id = await q.enqueue(deadline_ms=5_000, delay_ms=4_000)
    await q.pass_deadline(job_id)
    await q.pass_delay(job_id)
    assert (await q.claim()).claimed == ()
    assert [e.finish_reason for e in await q.endings(job_id)] == [FinishReason.EXPIRED]
    await q.assert_nothing_is_left()


async def test_jobs_cancelled_in_the_queue_are_passed_over(q: Any) -> None:
    ids = [await q.enqueue() for _ in range(300)]
    for job_id in ids[:-1]:
        await q.cancel(job_id)
    first = await q.claim()
    assert first.claimed == ()
    assert (first.waiting, first.next_due_ms) == (True, 0)
    assert [j.job_id for j in (await q.claim()).claimed] == [ids[-1]]
    assert await q.redis.xlen(q.keys.jobs(Lane.NORMAL)) == 1


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({os.urandom(40): os.urandom(2000)}, id="random"),
        pytest.param({"id": "x", "cost": "1", "job": os.urandom(99)}, id="no job id"),
        pytest.param({"id": new_job_id(), "job": b"x"}, id="no cost"),
        pytest.param({"id": new_job_id(), "cost": "many", "job": b"x"}, id="cost not a number"),
        pytest.param({"id": new_job_id(), "cost": "1"}, id="no job"),
        pytest.param({"id": "z" * 100_000, "cost": "1", "job": b"x" * 3 * 2**20}, id="large"),
    ],
)
async def test_an_undecodable_entry_is_a_dead_letter_at_once(q: Any, fields: Any) -> None:
    await q.redis.xadd(q.keys.jobs(Lane.NORMAL), fields)
    good = await q.enqueue()
    assert [j.job_id for j in (await q.claim()).claimed] == [good]
    [letter] = await q.scripts.dead_letters()
    assert letter.kind is DeadLetterKind.UNDECODABLE
    assert letter.job_id is None
    assert 0 < len(letter.payload) <= 65536
    assert await q.redis.xlen(q.keys.jobs(Lane.NORMAL)) == 1


async def test_an_entry_that_another_client_added_for_an_ended_job_goes_silently(q: Any) -> None:
    job_id = await q.enqueue()
    [job] = (await q.claim()).claimed
    await q.end("a", job)
    for other in (job_id, new_job_id()):
        await q.redis.xadd(q.keys.jobs(Lane.HIGH), {"id": other, "cost": 1, "job": b"x"})
    assert (await q.claim()).claimed == ()
    assert await q.scripts.dead_letters() == []
    await q.assert_nothing_is_left()


async def test_a_second_entry_of_a_queued_job_does_not_run_it_twice(q: Any) -> None:
    job_id = await q.enqueue()
    await q.redis.xadd(q.keys.jobs(Lane.HIGH), {"id": job_id, "cost": 16, "job": b"x"})
    claimed = (await q.claim()).claimed
    assert [(j.job_id, j.lane) for j in claimed] == [(job_id, Lane.NORMAL)]
    await q.end("a", claimed[0])
    await q.assert_nothing_is_left()


async def test_a_lost_group_is_made_anew_and_running_jobs_stay_where_they_are(q: Any) -> None:
    running, queued = await q.enqueue(), await q.enqueue()
    [job] = (await q.claim("a", max_jobs=1)).claimed
    await q.redis.xgroup_destroy(q.keys.jobs(Lane.NORMAL), GROUP)
    assert [j.job_id for j in (await q.claim("b")).claimed] == [queued]
    assert await q.pending("a") == 1
    assert (await q.scripts.status(running)).owner == "a"
    assert (await q.end("a", job)).status == "ok"
    assert await q.redis.xlen(q.keys.jobs(Lane.NORMAL)) == 1


async def test_an_emptied_server_serves_new_jobs(q: Any) -> None:
    await q.enqueue()
    [job] = (await q.claim()).claimed
    for key in await q.redis.keys(f"{q.keys.prefix}*"):
        await q.redis.delete(key)
    assert (await q.end("a", job)).status == "stale"
    assert (await q.claim()).claimed == ()
    fresh = await q.enqueue()
    assert [j.job_id for j in (await q.claim()).claimed] == [fresh]


async def test_the_lag_stays_a_number_through_cancels_claims_and_ends(q: Any) -> None:
    ids = [await q.enqueue() for _ in range(6)]
    for job_id in ids[1:4]:
        await q.cancel(job_id)
    stream = q.keys.jobs(Lane.NORMAL)
    assert (await q.redis.xinfo_groups(stream))[0]["lag"] == 6
    assert await q.redis.xlen(stream) == 6
    for job in (await q.claim(max_jobs=2)).claimed:
        await q.end("a", job)
    [group] = await q.redis.xinfo_groups(stream)
    assert group["lag"] == 1
    assert await q.redis.xlen(stream) == 1
