"""Publishing: contiguous, fenced, once, for many jobs in one call."""

from __future__ import annotations

from typing import Any

import pytest

from inferq.protocol.keys import Lane, new_job_id
from inferq.protocol.messages import Event, FinishReason
from inferq.protocol.replies import JobState, PublishItem


async def start(q: Any, count: int = 1) -> list[Any]:
    for _ in range(count):
        await q.enqueue()
    return list((await q.claim("a")).claimed)


async def test_events_of_many_jobs_are_appended_in_one_call(q: Any) -> None:
    jobs = await start(q, 50)
    replies = await q.publish(
        "a", *(q.item(j, first=0, tokens=n % 3 + 1) for n, j in enumerate(jobs))
    )
    assert [(r.job_id, r.status, r.offset) for r in replies] == [
        (j.job_id, "ok", n % 3 + 1) for n, j in enumerate(jobs)
    ]
    for n, job in enumerate(jobs):
        events = await q.events(job.job_id)
        assert [entry for entry, _ in events] == [f"{k + 1}-0" for k in range(n % 3 + 1)]
        assert [e.token_ids for _, e in events] == [(k,) for k in range(n % 3 + 1)]


async def test_an_event_of_several_tokens_counts_them_all(q: Any) -> None:
    [job] = await start(q)
    event = Event(token_ids=(5, 6, 7), text="abc", text_ends=(1, 2, 3)).encode()
    [reply] = await q.publish("a", PublishItem(job.job_id, 1, 0, ((3, event),)))
    assert reply.offset == 3
    assert [entry for entry, _ in await q.events(job.job_id)] == ["3-0"]
    assert (await q.scripts.status(job.job_id)).published == 3


async def test_a_publish_whose_reply_was_lost_adds_no_token_twice(q: Any) -> None:
    [job] = await start(q)
    item = q.item(job, first=0, tokens=3)
    await q.publish("a", item)
    for _ in range(3):
        [again] = await q.publish("a", item)
        assert (again.status, again.offset) == ("gap", 3)
    [rest] = await q.publish("a", q.item(job, first=3, tokens=1))
    assert (rest.status, rest.offset) == ("ok", 4)
    assert [entry for entry, _ in await q.events(job.job_id)] == [f"{n}-0" for n in range(1, 5)]


async def test_a_gap_is_refused_whole_with_the_servers_offset(q: Any) -> None:
    [job] = await start(q)
    await q.publish("a", q.item(job, first=0, tokens=2))
    [reply] = await q.publish("a", q.item(job, first=5, tokens=2, end=FinishReason.STOP))
    assert (reply.status, reply.offset) == ("gap", 2)
    assert len(await q.events(job.job_id)) == 2
    assert (await q.scripts.status(job.job_id)).state is JobState.RUNNING


async def test_an_end_settles_everything(q: Any) -> None:
    [job] = await start(q)
    [reply] = await q.publish("a", q.item(job, first=0, tokens=2, end=FinishReason.LENGTH))
    assert (reply.status, reply.offset) == ("ok", 2)
    assert [entry for entry, _ in await q.events(job.job_id)] == ["1-0", "2-0", "2-1"]
    assert [e.finish_reason for e in await q.endings(job.job_id)] == [FinishReason.LENGTH]
    status = await q.scripts.status(job.job_id)
    assert (status.state, status.finish_reason) == (JobState.DONE, FinishReason.LENGTH)
    assert status.finished_ms is not None
    for key in (q.keys.job(job.job_id), q.keys.out(job.job_id)):
        assert 0 < await q.redis.pttl(key) <= 60_000
    await q.assert_nothing_is_left()


async def test_an_end_whose_reply_was_lost_is_ok_again_and_written_once(q: Any) -> None:
    [job] = await start(q)
    item = q.item(job, first=0, tokens=1, end=FinishReason.STOP)
    for _ in range(3):
        [reply] = await q.publish("a", item)
        assert (reply.status, reply.offset) == ("ok", 1)
    assert len(await q.endings(job.job_id)) == 1
    [late] = await q.publish("b", item)
    assert late.status == "stale"
    await q.assert_nothing_is_left()


async def test_a_stale_item_does_not_touch_the_others(q: Any) -> None:
    first, second, third = await start(q, 3)
    await q.end_lease(second.job_id)
    await q.claim("b")
    unknown = PublishItem(new_job_id(), 1, 0, ((1, b"x"),))
    items = [q.item(j, first=0, tokens=1) for j in (first, second, third)]
    replies = await q.publish("a", *items, unknown)
    assert [r.status for r in replies] == ["ok", "stale", "ok", "stale"]
    assert await q.events(second.job_id) == []


async def test_publishing_renews_the_lease_and_the_expiry(q: Any) -> None:
    [job] = await start(q)
    await q.redis.zadd(q.keys.leases, {job.job_id: 5})
    await q.publish("a", q.item(job, first=0, tokens=1))
    assert await q.redis.zscore(q.keys.leases, job.job_id) > 10**12
    assert 0 < await q.redis.pttl(q.keys.out(job.job_id)) <= 60_000
    await q.redis.pexpire(q.keys.out(job.job_id), 5_000)
    await q.publish("a", q.item(job, first=1, tokens=1))
    assert await q.redis.pttl(q.keys.out(job.job_id)) > 5_000
    assert await q.redis.ttl(q.keys.job(job.job_id)) == -1


async def test_events_outlive_the_lease_and_the_jobs_retention_while_it_runs(q: Any) -> None:
    [job] = await start(q)
    out = q.keys.out(job.job_id)
    item = q.item(job, first=0, tokens=1)
    await q.scripts.publish("a", [item], lease_ms=1000, retention_ms=10)
    assert 50_000 < await q.redis.pttl(out) <= 60_000
    lease = [(job.job_id, 1)]
    await q.scripts.heartbeat("a", lease, lease_ms=1000, retention_ms=10)
    assert 50_000 < await q.redis.pttl(out) <= 60_000
    await q.scripts.heartbeat("a", lease, lease_ms=100_000, retention_ms=10)
    assert 190_000 < await q.redis.pttl(out) <= 200_000
    item = q.item(job, first=1, tokens=1)
    await q.scripts.publish("a", [item], lease_ms=200_000, retention_ms=10)
    assert 390_000 < await q.redis.pttl(out) <= 400_000


async def test_events_of_a_job_that_waits_for_another_worker_do_not_expire(q: Any) -> None:
    [job] = await start(q)
    out = q.keys.out(job.job_id)
    await q.publish("a", q.item(job, first=0, tokens=1))
    assert await q.redis.pttl(out) > 0
    await q.scripts.release("a", [(job.job_id, 1, None)])
    assert await q.redis.pttl(out) == -1
    [again] = (await q.claim("b")).claimed
    assert await q.redis.pttl(out) > 0
    await q.end_lease(job.job_id)
    await q.claim("c", max_jobs=0)
    assert await q.redis.pttl(out) == -1
    assert await q.cancel(again.job_id) == "cancelled"
    assert await q.redis.pttl(out) > 0


async def test_the_longer_of_the_two_retentions_holds_after_the_end(q: Any) -> None:
    [job] = await start(q)
    item = q.item(job, first=0, tokens=0, end=FinishReason.STOP)
    await q.scripts.publish("a", [item], lease_ms=1000, retention_ms=10)
    assert await q.redis.pttl(q.keys.out(job.job_id)) > 50_000


async def test_a_cancel_mark_rides_on_the_reply(q: Any) -> None:
    [job] = await start(q)
    await q.cancel(job.job_id)
    [reply] = await q.publish("a", q.item(job, first=0, tokens=1))
    assert (reply.status, reply.cancel) == ("ok", True)
    [beat] = await q.scripts.heartbeat("a", [(job.job_id, 1)], lease_ms=9, retention_ms=9)
    assert (beat.status, beat.offset, beat.cancel) == ("ok", 1, True)


async def test_a_stream_that_was_tampered_with_does_not_hold_up_the_others(q: Any) -> None:
    bad, good = await start(q, 2)
    await q.redis.xadd(q.keys.out(bad.job_id), {"e": b"x"}, id="9-0")
    replies = await q.publish("a", *(q.item(j, first=0, tokens=2) for j in (bad, good)))
    assert [r.status for r in replies] == ["stale", "ok"]


async def test_a_heartbeat_renews_only_ones_own_leases(q: Any) -> None:
    first, second = await start(q, 2)
    await q.end_lease(second.job_id)
    await q.claim("b")
    await q.redis.zadd(q.keys.leases, {first.job_id: 5, second.job_id: 10**14})
    leases = [(first.job_id, 1), (second.job_id, 1), (new_job_id(), 1)]
    replies = await q.scripts.heartbeat("a", leases, lease_ms=30_000, retention_ms=60_000)
    assert [r.status for r in replies] == ["ok", "stale", "stale"]
    assert await q.redis.zscore(q.keys.leases, first.job_id) > 10**12
    assert await q.redis.zscore(q.keys.leases, second.job_id) == 10**14


async def test_empty_calls_are_answered_empty(q: Any) -> None:
    assert await q.publish("a") == []
    assert await q.scripts.heartbeat("a", [], lease_ms=1, retention_ms=1) == []
    assert await q.scripts.release("a", []) == 0


async def test_exact_counts_replace_the_bounds(q: Any) -> None:
    job_id = await q.enqueue(prompt=500, budget=None, lane=Lane.HIGH)
    assert (await q.scripts.load()).budget_tokens == 0
    await q.claim("a")
    assert await q.scripts.recost("a", job_id, 1, prompt_tokens=42, budget=58)
    load = await q.scripts.load()
    assert (load.prompt_tokens, load.budget_tokens) == (42, 58)
    await q.scripts.release("a", [(job_id, 1, None)])
    [job] = (await q.claim("b", free=112)).claimed
    assert job.cost == 100
    await q.scripts.release("b", [(job_id, 2, None)])
    await q.cancel(job_id)
    [end] = await q.endings(job_id)
    assert (end.usage.prompt_tokens, end.attempts) == (42, 2)
    await q.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ((), FinishReason.STOP),
        (((2, b""),), None),
        (((3, b""), (3, b"")), None),
        (((3, b""), (2, b"")), FinishReason.STOP),
        (((2, b""), (3, b"")), None),
    ],
)
def test_events_that_bring_no_tokens_are_refused_when_made(events: Any, end: Any) -> None:
    with pytest.raises(ValueError, match="event"):
        PublishItem(new_job_id(), 1, 2, events, end)


async def test_reading_after_an_offset_brings_the_event_that_holds_the_next_token(q: Any) -> None:
    [job] = await start(q)
    event = Event(token_ids=(5, 6, 7), text="abc", text_ends=(1, 2, 3)).encode()
    await q.publish("a", PublishItem(job.job_id, 1, 0, ((3, event),)))
    await q.publish("a", q.item(job, first=3, tokens=0, end=FinishReason.STOP))
    out = q.keys.out(job.job_id)
    for offset, ids in ((0, [b"3-0", b"3-1"]), (2, [b"3-0", b"3-1"]), (3, [b"3-1"])):
        reply = await q.redis.xread({out: f"{offset}-0"})
        entries = reply[0][1] if isinstance(reply, list) else reply[out.encode()][0]
        assert [entry for entry, _ in entries] == ids
