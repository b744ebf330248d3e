"""Taking over: leases that ended, jobs given back, and the epoch that decides."""

from __future__ import annotations

from typing import Any

import pytest

from inferq.protocol.errors import ErrorCode
from inferq.protocol.keys import Lane
from inferq.protocol.messages import FinishReason
from inferq.protocol.replies import DeadLetterKind, JobState, Load, PublishStatus


async def test_a_lease_is_taken_over_only_after_it_ended(q: Any) -> None:
    job_id = await q.enqueue()
    await q.claim("a")
    assert (await q.claim("b")).claimed == ()
    await q.end_lease(job_id)
    [job] = (await q.claim("b")).claimed
    assert (job.job_id, job.epoch, job.attempts, job.crashes) == (job_id, 2, 2, 1)
    assert await q.pending("a") == 0
    assert await q.pending("b") == 1
    assert (await q.scripts.status(job_id)).owner == "b"


async def test_a_takeover_goes_on_at_the_published_offset(q: Any) -> None:
    job_id = await q.enqueue()
    [first] = (await q.claim("a")).claimed
    await q.publish("a", q.item(first, first=0, tokens=7))
    await q.end_lease(job_id)
    [second] = (await q.claim("b")).claimed
    assert second.published == 7
    assert second.payload == first.payload
    assert second.queued_ms == first.queued_ms
    await q.publish("b", q.item(second, first=7, tokens=3, end=FinishReason.LENGTH))
    ids = [entry for entry, _ in await q.events(job_id)]
    assert ids == [*(f"{n}-0" for n in range(1, 11)), "10-1"]
    await q.assert_nothing_is_left()


async def test_a_stalled_worker_that_returns_is_refused_everywhere(q: Any) -> None:
    job_id = await q.enqueue()
    [old] = (await q.claim("a")).claimed
    await q.publish("a", q.item(old, first=0, tokens=2))
    await q.end_lease(job_id)
    [new] = (await q.claim("b")).claimed
    before = await q.redis.zscore(q.keys.leases, job_id)
    [published] = await q.publish("a", q.item(old, first=2, tokens=1))
    [ended] = await q.publish("a", q.item(old, first=2, tokens=0, end=FinishReason.STOP))
    [beat] = await q.scripts.heartbeat("a", [(job_id, 1)], lease_ms=90_000, retention_ms=60_000)
    assert [r.status for r in (published, ended, beat)] == ["stale"] * 3
    assert await q.scripts.release("a", [(job_id, 1, None)]) == 0
    assert not await q.scripts.recost("a", job_id, 1, prompt_tokens=1, budget=1)
    assert not await q.scripts.reject("a", job_id, 1, code="x", message="y", retention_ms=1)
    assert await q.redis.zscore(q.keys.leases, job_id) == before
    assert len(await q.events(job_id)) == 2
    [reply] = await q.publish("b", q.item(new, first=2, tokens=1))
    assert reply.status == "ok"


async def test_the_epoch_counts_even_for_a_worker_of_the_same_name(q: Any) -> None:
    job_id = await q.enqueue()
    [old] = (await q.claim("a")).claimed
    await q.end_lease(job_id)
    [new] = (await q.claim("a")).claimed
    replies = await q.publish("a", q.item(old, first=0, tokens=1), q.item(new, first=0, tokens=1))
    assert [r.status for r in replies] == ["stale", "ok"]


async def test_five_thousand_ended_leases_are_all_reclaimed(q: Any) -> None:
    count = 5_000
    for _ in range(count):
        await q.enqueue()
    claimed = 0
    while claimed < count:
        claimed += len((await q.claim("dead", max_jobs=1000)).claimed)
    ids = await q.redis.zrange(q.keys.leases, 0, -1)
    await q.redis.zadd(q.keys.leases, dict.fromkeys(ids, 1))
    taken: set[str] = set()
    while jobs := (reply := await q.claim("b", max_jobs=1000)).claimed:
        taken |= {job.job_id for job in jobs}
        assert (reply.next_due_ms == 0) == (len(jobs) == 64)
    assert len(taken) == count
    assert await q.pending("dead") == 0
    assert await q.scripts.load() == Load(
        running=count, prompt_tokens=10 * count, budget_tokens=6 * count
    )


async def test_jobs_left_behind_come_before_the_lanes(q: Any) -> None:
    left = await q.enqueue(lane=Lane.LOW)
    await q.claim("a")
    urgent = await q.enqueue(lane=Lane.HIGH)
    await q.end_lease(left)
    assert [j.job_id for j in (await q.claim("b")).claimed] == [left, urgent]


async def test_a_job_left_behind_that_does_not_fit_waits_and_is_blamed_once(q: Any) -> None:
    big = await q.enqueue(prompt=500, budget=400)
    await q.claim("a")
    await q.end_lease(big)
    for _ in range(5):
        reply = await q.claim("b", free=64)
        assert reply.claimed == ()
        assert reply.waiting
    status = await q.scripts.status(big)
    assert (status.state, status.crashes, status.owner) == (JobState.RELEASED, 1, None)
    assert await q.scripts.load() == Load(queued=1, prompt_tokens=500, budget_tokens=400)
    small = await q.enqueue()
    assert (await q.claim("b", free=64, starve_ms=0)).claimed == ()
    assert [j.job_id for j in (await q.claim("b", free=64)).claimed] == [small]
    assert [j.job_id for j in (await q.claim("c", free=912)).claimed] == [big]


async def test_a_job_that_kills_its_workers_is_a_dead_letter_and_others_carry_no_blame(
    q: Any,
) -> None:
    poison, good = await q.enqueue(), await q.enqueue()
    await q.claim("a")
    for crash in range(1, 4):
        await q.end_lease(poison)
        claimed = {j.job_id: j for j in (await q.claim("b", idle=True)).claimed}
        assert (poison in claimed) == (crash < 3)
    [letter] = await q.scripts.dead_letters()
    assert (letter.kind, letter.job_id) == (DeadLetterKind.CRASHED, poison)
    assert letter.crashes == 3
    assert "3 workers" in letter.reason
    [end] = await q.endings(poison)
    assert end.finish_reason is FinishReason.ERROR
    assert end.error.code == ErrorCode.WORKER_CRASHED
    assert end.error.field is None
    status = await q.scripts.status(good)
    assert (status.state, status.crashes) == (JobState.RUNNING, 0)
    assert await q.scripts.load() == Load(running=1, prompt_tokens=10, budget_tokens=6)


async def test_jobs_beside_a_poisonous_one_are_cleared_by_running_alone(q: Any) -> None:
    poison = await q.enqueue()
    good = [await q.enqueue() for _ in range(9)]
    await q.claim("a")
    for worker in "bc":
        for job_id in (poison, *good):
            await q.end_lease(job_id)
        claimed = (await q.claim(worker, idle=True)).claimed
        assert [job.runs_alone for job in claimed] == ([False] * 10 if worker == "b" else [True])
    finished = 0
    for _ in range(20):
        for job in claimed:
            if job.job_id == poison:
                await q.end_lease(poison)
            else:
                await q.end("c", job)
                finished += 1
        claimed = (await q.claim("c", idle=True)).claimed
        assert len(claimed) <= 1
    assert finished == 9
    [letter] = await q.scripts.dead_letters()
    assert (letter.job_id, letter.crashes) == (poison, 3)
    assert "the last with nothing beside it" in letter.reason
    await q.assert_nothing_is_left()


async def test_one_busy_worker_makes_way_for_a_job_that_must_run_alone(q: Any) -> None:
    suspect = await q.enqueue()
    await q.claim("a")
    await q.redis.hset(q.keys.job(suspect), "crashes", 1)
    await q.end_lease(suspect)
    waiting = [await q.enqueue() for _ in range(3)]
    first = await q.claim("b", max_jobs=1)
    assert (first.claimed, first.waiting) == ((), True)
    [job] = (await q.claim("c", max_jobs=1)).claimed  # another one goes on serving
    assert job.job_id == waiting[0]
    [alone] = (await q.claim("b", idle=True)).claimed
    assert (alone.job_id, alone.runs_alone) == (suspect, True)
    assert len((await q.claim("c")).claimed) == 2


async def test_a_worker_that_made_way_and_died_is_replaced(q: Any) -> None:
    suspect = await q.enqueue()
    await q.claim("a")
    await q.redis.hset(q.keys.job(suspect), "crashes", 1)
    await q.end_lease(suspect)
    await q.enqueue()
    assert (await q.claim("b")).claimed == ()
    await q.redis.hset(q.keys.load, "makes_way", "1 b")
    assert (await q.claim("c")).claimed == ()
    assert len((await q.claim("b")).claimed) == 1


async def make_suspects(q: Any, count: int) -> list[str]:
    """Jobs that are one crash from their end and wait for a worker, the first to be taken first."""
    ids = sorted([await q.enqueue() for _ in range(count)])
    await q.claim("gone", max_jobs=count)
    for job_id in ids:
        await q.redis.hset(q.keys.job(job_id), "crashes", 1)
        await q.end_lease(job_id)
    return ids


async def test_many_suspects_hide_nothing_and_cost_no_busy_loop(q: Any) -> None:
    suspects = await make_suspects(q, 70)
    late = await q.enqueue()
    await q.claim("gone", max_crashes=99)  # takes them all, as it sees no suspects
    await q.claim("gone", max_crashes=99)
    for job_id in suspects:
        await q.end_lease(job_id)
        await q.redis.hset(q.keys.job(job_id), "crashes", 1)
    assert await q.scripts.release("gone", [(late, 1, None)]) == 1
    await q.claim("b")  # makes way
    taken: list[str] = []
    for _ in range(3):
        reply = await q.claim("c")
        taken += [job.job_id for job in reply.claimed]
    assert taken == [late]
    assert reply.next_due_ms != 0
    [alone] = (await q.claim("b", idle=True)).claimed
    assert alone.job_id == suspects[0]


async def test_suspects_do_not_take_every_worker_from_the_lanes(q: Any) -> None:
    suspects = await make_suspects(q, 3)
    fresh = [await q.enqueue() for _ in range(4)]
    [first] = (await q.claim("b", idle=True)).claimed
    assert (first.job_id, first.runs_alone) == (suspects[0], True)
    served = (await q.claim("c", idle=True)).claimed
    assert [job.job_id for job in served] == fresh
    # but one that has nothing else to do helps
    [second] = (await q.claim("d", idle=True)).claimed
    assert (second.job_id, second.runs_alone) == (suspects[1], True)
    await q.end("b", first)
    [third] = (await q.claim("b", idle=True)).claimed
    assert third.job_id == suspects[2]


@pytest.mark.parametrize("how", ["cancelled", "late", "unknown"])
async def test_a_worker_that_makes_way_for_a_job_that_ends_takes_others_again(
    q: Any, how: str
) -> None:
    [suspect] = await make_suspects(q, 1)
    fresh = await q.enqueue(lane=Lane.HIGH)
    assert (await q.claim("b")).claimed == ()
    match how:
        case "cancelled":
            assert await q.cancel(suspect) == "cancelled"
        case "late":
            await q.redis.hset(q.keys.job(suspect), "deadline", 1)
        case "unknown":
            await q.redis.delete(q.keys.job(suspect))
    assert [job.job_id for job in (await q.claim("b")).claimed] == [fresh]


async def test_a_worker_without_a_place_makes_no_way(q: Any) -> None:
    [suspect] = await make_suspects(q, 1)
    assert (await q.claim("b", max_jobs=0)).claimed == ()
    [alone] = (await q.claim("c", idle=True)).claimed
    assert alone.job_id == suspect


async def test_a_suspect_is_none_to_a_worker_that_allows_more_crashes(q: Any) -> None:
    [suspect] = await make_suspects(q, 1)
    assert (await q.claim("b")).claimed == ()
    assert (await q.claim("c", max_crashes=9)).claimed == ()  # it is no suspect any more
    [job] = (await q.claim("c", max_crashes=9)).claimed
    assert (job.job_id, job.runs_alone) == (suspect, False)


async def test_a_suspect_that_is_handed_back_runs_alone_again(q: Any) -> None:
    [suspect] = await make_suspects(q, 1)
    [alone] = (await q.claim("b", idle=True)).claimed
    await q.scripts.release("b", [(suspect, alone.epoch, None)])
    assert (await q.claim("c")).claimed == ()
    [again] = (await q.claim("d", idle=True, lease_ms=0)).claimed
    assert (again.job_id, again.runs_alone, again.crashes) == (suspect, True, 2)


async def test_rare_calls_do_not_put_off_a_takeover_for_ever(q: Any) -> None:
    job_id = await q.enqueue()
    await q.claim("a")
    await q.redis.zadd(q.keys.leases, {job_id: 2})
    await q.redis.hset(q.keys.load, "seen", 1)
    assert (await q.claim("b")).claimed == ()  # the lease ended in the silence
    # The next call is as rare: another silence, but this one began after the lease's end.
    await q.redis.hset(q.keys.load, mapping={"seen": 3, "grace": 3})
    [job] = (await q.claim("b")).claimed
    assert (job.job_id, job.crashes) == (job_id, 1)


async def test_what_a_dead_engine_left_is_not_renewed_by_a_late_call(q: Any) -> None:
    job_id = await q.enqueue()
    [job] = (await q.claim("a")).claimed
    await q.scripts.reconcile("a", [], crashed=True)
    [reply] = await q.publish("a", q.item(job, first=0, tokens=1))
    [beat] = await q.scripts.heartbeat("a", [(job_id, 1)], lease_ms=90_000, retention_ms=60_000)
    assert (reply.status, beat.status) == ("stale", "stale")
    [taken] = (await q.claim("b")).claimed
    assert (taken.job_id, taken.crashes) == (job_id, 1)


async def test_a_job_whose_events_were_tampered_with_ends_and_holds_up_nobody(q: Any) -> None:
    job_id, other = await q.enqueue(), await q.enqueue()
    await q.claim("a")
    await q.redis.xadd(q.keys.out(job_id), {"e": b"x"}, id="99-0")
    await q.redis.hset(q.keys.job(job_id), "cancel", 1)
    await q.end_lease(job_id)
    await q.end_lease(other)
    assert [job.job_id for job in (await q.claim("b")).claimed] == [other]
    [end] = await q.endings(job_id)
    assert end.finish_reason is FinishReason.CANCELLED


async def test_leases_that_end_while_the_server_is_away_are_nobodys_crash(q: Any) -> None:
    job_id = await q.enqueue()
    [job] = (await q.claim("a")).claimed
    await q.redis.zadd(q.keys.leases, {job_id: 2})
    await q.redis.hset(q.keys.load, "seen", 1)
    assert (await q.claim("b")).claimed == ()
    [reply] = await q.scripts.heartbeat(
        "a", [(job_id, job.epoch)], lease_ms=30_000, retention_ms=60_000
    )
    assert reply.status is PublishStatus.OK
    assert (await q.scripts.status(job_id)).crashes == 0


async def test_a_worker_that_lost_its_jobs_in_a_silence_hands_them_back_uncounted(q: Any) -> None:
    job_id = await q.enqueue()
    await q.claim("a")
    await q.redis.zadd(q.keys.leases, {job_id: 2})
    await q.redis.hset(q.keys.load, "seen", 1)
    assert await q.scripts.reconcile("a", []) == 1
    [job] = (await q.claim("b")).claimed
    assert (job.job_id, job.crashes) == (job_id, 0)


async def test_after_a_silence_jobs_of_a_worker_that_stays_away_are_taken_over(q: Any) -> None:
    job_id = await q.enqueue()
    await q.claim("a")
    await q.redis.zadd(q.keys.leases, {job_id: 2})
    await q.redis.hset(q.keys.load, "seen", 1)
    assert (await q.claim("b")).claimed == ()
    await q.redis.hset(q.keys.load, "grace", 1)
    [job] = (await q.claim("b")).claimed
    assert (job.job_id, job.crashes) == (job_id, 1)


async def test_jobs_of_a_process_that_is_gone_are_taken_over_at_once_and_counted(q: Any) -> None:
    job_id = await q.enqueue()
    await q.claim("a")
    assert await q.scripts.reconcile("a", [], crashed=True) == 1
    assert (await q.scripts.status(job_id)).state is JobState.RUNNING
    [job] = (await q.claim("b")).claimed
    assert (job.job_id, job.crashes) == (job_id, 1)


async def test_handing_back_is_no_crash_and_is_claimable_at_once(q: Any) -> None:
    job_id = await q.enqueue()
    for round_ in range(1, 6):
        [job] = (await q.claim("a", max_crashes=2)).claimed
        assert (job.epoch, job.crashes) == (round_, 0)
        await q.publish("a", q.item(job, first=job.published, tokens=1))
        assert await q.scripts.release("a", [(job_id, job.epoch, None)]) == 1
        assert await q.scripts.load() == Load(queued=1, prompt_tokens=10, budget_tokens=6)
    status = await q.scripts.status(job_id)
    assert (status.handoffs, status.crashes, status.published) == (5, 0, 5)


async def test_handing_back_the_same_job_twice_counts_once(q: Any) -> None:
    job_id = await q.enqueue()
    await q.claim("a")
    assert await q.scripts.release("a", [(job_id, 1, None)]) == 1
    assert await q.scripts.release("a", [(job_id, 1, None)]) == 0
    assert (await q.scripts.status(job_id)).handoffs == 1


async def test_the_exact_cost_written_back_decides_the_next_claim(q: Any) -> None:
    job_id = await q.enqueue(prompt=600, budget=300)
    await q.claim("a", free=160, idle=True)
    await q.scripts.release("a", [(job_id, 1, 100)])
    [job] = (await q.claim("b", free=112)).claimed
    assert job.cost == 100


async def test_a_counted_cost_may_be_several_contexts_and_a_bound_counts_as_one(q: Any) -> None:
    job_id = await q.enqueue(prompt=600, budget=4 * 500)
    [job] = (await q.claim("a", free=1008)).claimed
    assert (job.cost, job.space) == (2600, 1008)
    await q.scripts.release("a", [(job_id, 1, 2500)])
    assert (await q.claim("b", free=2495)).claimed == ()
    [job] = (await q.claim("b", free=2512)).claimed
    assert (job.cost, job.space) == (2500, 2512)
    # what `recost` writes counts in full, too
    await q.scripts.recost("b", job_id, 2, prompt_tokens=600, budget=1900)
    await q.scripts.release("b", [(job_id, 2, None)])
    assert (await q.claim("c", free=2000)).claimed == ()
    [job] = (await q.claim("c", free=16, idle=True)).claimed
    assert job.space == 2512


async def test_a_cancel_mark_or_a_deadline_ends_a_job_left_behind(q: Any) -> None:
    marked, late = await q.enqueue(), await q.enqueue(deadline_ms=60_000)
    await q.claim("a")
    assert await q.cancel(marked) == "requested"
    await q.pass_deadline(late)
    await q.end_lease(marked)
    await q.end_lease(late)
    assert (await q.claim("b")).claimed == ()
    assert [e.finish_reason for e in await q.endings(marked)] == [FinishReason.CANCELLED]
    assert [e.finish_reason for e in await q.endings(late)] == [FinishReason.EXPIRED]
    await q.assert_nothing_is_left()


@pytest.mark.parametrize("lost", ["entry", "events"])
async def test_a_job_that_cannot_go_on_ends_with_an_error(q: Any, lost: str) -> None:
    job_id = await q.enqueue()
    [job] = (await q.claim("a")).claimed
    await q.publish("a", q.item(job, first=0, tokens=1))
    if lost == "entry":
        await q.redis.delete(q.keys.jobs(Lane.NORMAL))
    else:
        await q.redis.delete(q.keys.out(job_id))
    await q.end_lease(job_id)
    assert (await q.claim("b")).claimed == ()
    [end] = await q.endings(job_id)
    assert end.error.code == ErrorCode.INTERNAL
    await q.assert_nothing_is_left()


async def test_a_claim_whose_reply_was_lost_is_handed_back_by_its_own_worker(q: Any) -> None:
    seen = await q.enqueue()
    await q.claim("a")
    unseen = [await q.enqueue(), await q.enqueue(lane=Lane.LOW)]
    await q.claim("a")  # its reply is lost
    assert await q.scripts.reconcile("a", [seen]) == 2
    assert await q.scripts.reconcile("a", [seen]) == 0
    claimed = (await q.claim("b")).claimed
    assert {j.job_id for j in claimed} == set(unseen)
    assert all(j.crashes == 0 for j in claimed)
    assert (await q.scripts.status(seen)).owner == "a"
    assert await q.scripts.reconcile("b", [j.job_id for j in claimed]) == 0
    assert await q.scripts.reconcile("nobody", []) == 0


@pytest.mark.parametrize("crashed", [False, True])
async def test_all_jobs_of_a_worker_are_handed_back_however_many(q: Any, crashed: bool) -> None:
    """More than one call looks at, in lanes that a call ends within and between."""
    counts = {Lane.HIGH: 1_000, Lane.NORMAL: 1_100, Lane.LOW: 3}
    ids = {await q.enqueue(lane=lane) for lane, count in counts.items() for _ in range(count)}
    await q.claim("a", max_jobs=len(ids))
    assert await q.pending("a") == len(ids)
    assert await q.scripts.reconcile("a", [], crashed=crashed) == len(ids)
    taken: set[str] = set()
    while jobs := (await q.claim("b", max_jobs=len(ids))).claimed:
        assert all(job.crashes == crashed for job in jobs)
        taken |= {job.job_id for job in jobs}
    assert taken == ids


async def test_a_lost_claim_is_found_behind_however_many_jobs(q: Any) -> None:
    for _ in range(1_203):
        await q.enqueue()
    known = [job.job_id for job in (await q.claim("a", max_jobs=1_200)).claimed]
    lost = (await q.claim("a")).claimed
    assert (len(known), len(lost)) == (1_200, 3)
    assert await q.scripts.reconcile("a", known) == 3
    assert {j.job_id for j in (await q.claim("b")).claimed} == {j.job_id for j in lost}


async def test_jobs_of_long_payloads_are_handed_back_in_several_calls(
    q: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that none holds the server for long."""
    for _ in range(10):
        await q.enqueue_long(4 * 2**20)
    for _ in range(10):
        assert len((await q.claim("a")).claimed) == 1
    calls = 0
    call = q.scripts._call

    async def counted(name: str, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        return await call(name, *args)

    monkeypatch.setattr(q.scripts, "_call", counted)
    assert await q.scripts.reconcile("a", []) == 10
    assert calls == 3


async def test_a_claim_whose_reply_was_lost_is_found_after_the_lease(q: Any) -> None:
    job_id = await q.enqueue()
    await q.claim("a")
    await q.end_lease(job_id)
    assert [j.job_id for j in (await q.claim("a")).claimed] == [job_id]
