"""Submission: once, within the limit, by key."""

from __future__ import annotations

from typing import Any

import pytest

from inferq.protocol.digest import content_digest
from inferq.protocol.errors import IdempotencyConflict, InvalidRequestError, QueueFull
from inferq.protocol.keys import GROUP, Lane, new_job_id
from inferq.protocol.messages import (
    ChatMessage,
    ChatPrompt,
    FinishReason,
    Job,
    TextPrompt,
    TokenPrompt,
)
from inferq.protocol.params import SamplingParams
from inferq.protocol.replies import JobState, Load
from inferq.protocol.scripts import MAX_RETENTION_MS, MAX_WAIT_MS

OPTIONS: dict[str, Any] = {
    "lane": Lane.NORMAL,
    "prompt_tokens": 10,
    "budget": 6,
    "queue_limit": 3,
    "retention_ms": 60_000,
}


def make_job(text: str = "hello", **params: Any) -> Job:
    return Job(new_job_id(), TextPrompt(text), SamplingParams(**params))


async def test_a_job_waits_in_its_lane_with_a_group_that_starts_at_zero(q: Any) -> None:
    job = make_job()
    assert (await q.scripts.enqueue(job, **OPTIONS)).created
    [(entry, fields)] = await q.redis.xrange(q.keys.jobs(Lane.NORMAL))
    assert fields == {b"id": job.id.encode(), b"cost": b"16", b"job": job.encode()}
    [group] = await q.redis.xinfo_groups(q.keys.jobs(Lane.NORMAL))
    assert group["name"] == GROUP.encode()
    assert group["last-delivered-id"] == b"0-0"
    assert group["lag"] == 1
    status = await q.scripts.status(job.id)
    assert status.state is JobState.QUEUED
    assert status.attempts == 0
    assert await q.redis.hget(q.keys.job(job.id), "entry") == entry
    assert await q.scripts.load() == Load(queued=1, prompt_tokens=10, budget_tokens=6)


async def test_a_submission_whose_reply_was_lost_three_times_makes_one_job(q: Any) -> None:
    job = make_job()
    first = await q.scripts.enqueue(job, **OPTIONS)
    for _ in range(3):
        again = await q.scripts.enqueue(job, **OPTIONS)
        assert again.job_id == first.job_id
        assert not again.created
    assert await q.redis.xlen(q.keys.jobs(Lane.NORMAL)) == 1
    assert await q.scripts.load() == Load(queued=1, prompt_tokens=10, budget_tokens=6)


async def test_a_retry_is_answered_even_when_the_queue_is_full_or_the_job_has_ended(q: Any) -> None:
    job = make_job()
    options = OPTIONS | {"queue_limit": 1}
    await q.scripts.enqueue(job, **options)
    assert not (await q.scripts.enqueue(job, **options)).created
    await q.cancel(job.id)
    assert not (await q.scripts.enqueue(job, **options)).created
    assert len(await q.endings(job.id)) == 1


async def test_the_same_key_twice_gives_the_same_job_and_other_content_a_conflict(q: Any) -> None:
    first = await q.scripts.enqueue(make_job(), idempotency_key="k", **OPTIONS)
    second = await q.scripts.enqueue(make_job(), idempotency_key="k", **OPTIONS)
    assert second.job_id == first.job_id
    assert (first.created, second.created) == (True, False)
    with pytest.raises(IdempotencyConflict, match="'k'") as conflict:
        await q.scripts.enqueue(make_job("other"), idempotency_key="k", **OPTIONS)
    assert conflict.value.job_id == first.job_id
    assert (await q.scripts.enqueue(make_job(), idempotency_key="l", **OPTIONS)).created
    assert await q.redis.xlen(q.keys.jobs(Lane.NORMAL)) == 2


async def test_a_drawn_seed_does_not_count_when_the_caller_gives_the_digest(q: Any) -> None:
    digest = content_digest(TextPrompt("hello"), SamplingParams(), None, {})
    options = OPTIONS | {"idempotency_key": "k", "digest": digest}
    first = await q.scripts.enqueue(make_job(seed=1), **options)
    second = await q.scripts.enqueue(make_job(seed=2), **options)
    assert second.job_id == first.job_id


async def test_a_key_lives_as_long_as_its_job_and_the_retention_after(q: Any) -> None:
    job = make_job()
    await q.scripts.enqueue(job, idempotency_key="k", **OPTIONS)
    assert await q.redis.pttl(q.keys.idem("k")) == -1
    await q.cancel(job.id)
    for key in (q.keys.idem("k"), q.keys.job(job.id), q.keys.out(job.id)):
        assert 0 < await q.redis.pttl(key) <= 60_000


async def test_a_job_id_is_never_used_for_other_content(q: Any) -> None:
    job = make_job()
    await q.scripts.enqueue(job, **OPTIONS)
    other = Job(job.id, TextPrompt("other"), SamplingParams())
    with pytest.raises(InvalidRequestError, match="job_id"):
        await q.scripts.enqueue(other, **OPTIONS)


async def test_a_full_queue_refuses_with_its_numbers_and_writes_nothing(q: Any) -> None:
    for delay_ms in (0, 0, 5_000):
        await q.scripts.enqueue(make_job(), delay_ms=delay_ms, **OPTIONS)
    before = await q.redis.hgetall(q.keys.load)
    job = make_job()
    with pytest.raises(QueueFull) as full:
        await q.scripts.enqueue(job, idempotency_key="k", **OPTIONS)
    assert (full.value.depth, full.value.limit) == (3, 3)
    assert await q.scripts.status(job.id) is None
    assert not await q.redis.exists(q.keys.idem("k"))
    assert await q.redis.hgetall(q.keys.load) == before
    await q.claim()
    assert (await q.scripts.enqueue(job, idempotency_key="k", **OPTIONS)).created


async def test_a_delayed_job_enters_its_lane_when_it_is_due(q: Any) -> None:
    job_id = await q.enqueue(delay_ms=60_000, lane=Lane.HIGH)
    reply = await q.claim()
    assert reply.claimed == ()
    assert 0 < reply.next_due_ms <= 60_000
    assert (await q.scripts.status(job_id)).state is JobState.DELAYED
    assert await q.scripts.load() == Load(delayed=1, prompt_tokens=10, budget_tokens=6)
    await q.pass_delay(job_id)
    [job] = (await q.claim()).claimed
    assert (job.job_id, job.lane) == (job_id, Lane.HIGH)
    assert Job.decode(job.payload).id == job_id
    assert not await q.redis.hexists(q.keys.job(job_id), "payload")
    await q.end("a", job)
    await q.assert_nothing_is_left()


async def test_more_delayed_jobs_than_one_claim_promotes_all_start(q: Any) -> None:
    ids = [await q.enqueue(delay_ms=60_000) for _ in range(150)]
    for job_id in ids:
        await q.pass_delay(job_id)
    first = await q.claim(max_jobs=1000)
    assert first.next_due_ms == 0
    second = await q.claim(max_jobs=1000)
    assert {j.job_id for j in (*first.claimed, *second.claimed)} == set(ids)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"delay_ms": -1}, "delay"),
        ({"delay_ms": MAX_WAIT_MS + 1}, "delay"),
        ({"deadline_ms": 0}, "deadline"),
        ({"deadline_ms": 1000, "delay_ms": 1000}, "deadline"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "é" * 129}, "idempotency_key"),
        ({"retention_ms": 0}, "retention"),
        ({"retention_ms": MAX_RETENTION_MS + 1}, "retention"),
    ],
)
async def test_options_out_of_range_are_refused_by_name(
    q: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await q.scripts.enqueue(make_job(), **(OPTIONS | options))
    assert refused.value.field == field
    assert await q.scripts.load() == Load()


async def test_the_longest_retention_is_taken_by_every_script(q: Any) -> None:
    longest = {"retention_ms": MAX_RETENTION_MS}
    running, cancelled = make_job("a"), make_job("b")
    for job in (running, cancelled):
        await q.scripts.enqueue(job, **OPTIONS | longest)
    [claimed] = (await q.claim(max_jobs=1, **longest)).claimed
    item = q.item(claimed, first=0, tokens=1, end=FinishReason.STOP)
    await q.scripts.publish("a", [item], lease_ms=1000, **longest)
    await q.scripts.cancel(cancelled.id, **longest)
    for job in (running, cancelled):
        assert await q.redis.pttl(q.keys.out(job.id)) > MAX_RETENTION_MS - 60_000
    with pytest.raises(InvalidRequestError, match="retention"):
        await q.scripts.cancel(cancelled.id, retention_ms=MAX_RETENTION_MS + 1)
    with pytest.raises(InvalidRequestError, match="retention"):
        await q.scripts.expire(cancelled.id, retention_ms=0)


async def test_a_job_of_another_partition_is_refused(q: Any) -> None:
    job = Job(new_job_id(7), TextPrompt("x"), SamplingParams())
    with pytest.raises(InvalidRequestError, match="partition 0"):
        await q.scripts.enqueue(job, **OPTIONS)


def test_the_digest_tells_content_apart_and_nothing_else() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"])
    base = content_digest(TextPrompt("x"), params, "m", {"a": "1", "b": "2"})
    assert len(base) == 64
    assert base == content_digest(
        TextPrompt("x"), SamplingParams(stop=("a",), temperature=0.5), "m", {"b": "2", "a": "1"}
    )
    others = [
        content_digest(TextPrompt("y"), params, "m", {"a": "1", "b": "2"}),
        content_digest(TokenPrompt((1, 2)), params, "m", {"a": "1", "b": "2"}),
        content_digest(ChatPrompt((ChatMessage("user", "x"),)), params, "m", {"a": "1", "b": "2"}),
        content_digest(TextPrompt("x"), SamplingParams(), "m", {"a": "1", "b": "2"}),
        content_digest(TextPrompt("x"), params, None, {"a": "1", "b": "2"}),
        content_digest(TextPrompt("x"), params, "m", {"a": "1"}),
    ]
    assert len({base, *others}) == 7
