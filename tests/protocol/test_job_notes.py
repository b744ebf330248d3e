"""What a producer writes down beside its job, and how long a queue is."""

from __future__ import annotations

from typing import Any

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import Lane
from inferq.protocol.replies import JobState, QueueLength
from inferq.protocol.scripts import MAX_NOTE_BYTES


async def test_a_note_is_kept_as_long_as_the_jobs_record(q: Any) -> None:
    note = bytes(range(256))
    job_id = await q.enqueue(note=note)
    assert (await q.scripts.status(job_id)).note == note
    [job] = (await q.claim()).claimed
    await q.end("a", job)
    assert (await q.scripts.status(job_id)).note == note


async def test_a_job_without_a_note_has_none(q: Any) -> None:
    job_id = await q.enqueue()
    assert (await q.scripts.status(job_id)).note is None
    assert not await q.redis.hexists(q.keys.job(job_id), "note")


async def test_a_repeated_submission_keeps_the_first_note(q: Any) -> None:
    first = await q.enqueue(note=b"first", idempotency_key="k")
    again = await q.enqueue(note=b"second", idempotency_key="k")
    assert again == first
    assert (await q.scripts.status(first)).note == b"first"


async def test_a_delayed_job_keeps_its_note(q: Any) -> None:
    job_id = await q.enqueue(note=b"n", delay_ms=60_000)
    await q.pass_delay(job_id)
    await q.claim()
    assert (await q.scripts.status(job_id)).note == b"n"


async def test_a_note_that_is_too_long_is_refused(q: Any) -> None:
    await q.enqueue(note=b"x" * MAX_NOTE_BYTES)
    with pytest.raises(InvalidRequestError) as caught:
        await q.enqueue(note=b"x" * (MAX_NOTE_BYTES + 1))
    assert (caught.value.field, caught.value.limit) == ("note", str(MAX_NOTE_BYTES))


async def test_the_length_of_a_queue_counts_jobs_by_state_and_those_that_ended(q: Any) -> None:
    assert await q.scripts.length(limit=9) == QueueLength(0, 0, 0, finished_total=0, limit=9)
    for _ in range(3):
        await q.enqueue()
    await q.enqueue(delay_ms=60_000)
    cancelled = await q.enqueue(lane=Lane.LOW)
    await q.cancel(cancelled)
    [job] = (await q.claim(max_jobs=1)).claimed
    length = await q.scripts.length(limit=9)
    assert length == QueueLength(2, 1, 1, finished_total=1, limit=9)
    assert length.waiting == 3
    await q.end("a", job)
    assert (await q.scripts.length(limit=9)).finished_total == 2
    assert length.joined(length) == QueueLength(4, 2, 2, finished_total=2, limit=18)


async def test_what_is_let_go_of_is_gone_before_its_time(q: Any) -> None:
    job_id = await q.enqueue(idempotency_key="k")
    [job] = (await q.claim()).claimed
    await q.end("a", job)
    keys = (q.keys.job(job_id), q.keys.out(job_id), q.keys.idem("k"))
    assert [await q.redis.exists(key) for key in keys] == [1, 1, 1]
    await q.scripts.forget(job_id)
    assert [await q.redis.exists(key) for key in keys] == [0, 0, 0]


async def test_a_key_of_a_job_that_is_let_go_of_stands_for_the_next_one(q: Any) -> None:
    job_id = await q.enqueue(idempotency_key="k")
    await q.cancel(job_id)
    assert await q.scripts.forget(job_id) == 1
    assert await q.scripts.find("k") is None
    again = await q.enqueue(idempotency_key="k")
    assert again != job_id
    assert (await q.scripts.status(again)).state is JobState.QUEUED
    assert await q.scripts.find("k") == again


async def test_a_key_that_stands_for_a_later_job_is_not_let_go_of_with_the_first(q: Any) -> None:
    first = await q.enqueue(idempotency_key="k")
    await q.cancel(first)
    await q.redis.delete(q.keys.idem("k"))
    second = await q.enqueue(idempotency_key="k")
    assert await q.scripts.forget(first) == 1
    assert await q.scripts.find("k") == second
    assert await q.enqueue(idempotency_key="k") == second


async def test_a_job_that_has_not_ended_is_not_let_go_of(q: Any) -> None:
    ids = [await q.enqueue() for _ in range(3)]
    jobs = (await q.claim()).claimed
    await q.end("a", jobs[0])
    assert await q.scripts.forget(*ids, "0" * 32 + "-0") == 1
    await q.end("a", jobs[1])
    assert (await q.scripts.load()).running == len(jobs) - 2
    assert await q.redis.pttl(q.keys.job(ids[1])) > 1
    assert await q.redis.pttl(q.keys.job(ids[2])) == -1


async def test_a_job_is_found_by_its_key(q: Any) -> None:
    job_id = await q.enqueue(idempotency_key="mine")
    assert await q.scripts.find("mine") == job_id
    assert await q.scripts.find("another's") is None
