"""Cancel and expire in every state: exactly one terminal event, decided on the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inferq.protocol.errors import ErrorCode, InvalidRequestError
from inferq.protocol.keys import Lane, new_job_id
from inferq.protocol.messages import FinishReason
from inferq.protocol.replies import DeadLetterKind


async def bring_to(q: Any, state: str, **options: Any) -> str:
    """Submit a job and bring it to a state."""
    delay = 60_000 if state == "delayed" else 0
    job_id: str = await q.enqueue(delay_ms=delay, **options)
    if state in ("queued", "delayed"):
        return job_id
    [job] = (await q.claim("a")).claimed
    await q.publish("a", q.item(job, first=0, tokens=2))
    if state == "released":
        await q.scripts.release("a", [(job_id, 1, None)])
    elif state == "abandoned":
        await q.end_lease(job_id)
    elif state == "done":
        await q.publish("a", q.item(job, first=2, tokens=0, end=FinishReason.STOP))
    return job_id


@pytest.mark.parametrize("state", ["queued", "delayed", "released", "abandoned"])
async def test_a_job_that_no_worker_has_is_cancelled_at_once(q: Any, state: str) -> None:
    job_id = await bring_to(q, state)
    assert await q.cancel(job_id) == "cancelled"
    assert await q.cancel(job_id) == "cancelled"
    assert (await q.claim("b")).claimed == ()
    [end] = await q.endings(job_id)
    assert end.finish_reason is FinishReason.CANCELLED
    tokens = 2 if state in ("released", "abandoned") else 0
    assert end.usage.completion_tokens == tokens
    assert (await q.events(job_id))[-1][0] == f"{tokens}-1"
    assert (await q.scripts.status(job_id)).finish_reason is FinishReason.CANCELLED
    await q.assert_nothing_is_left()


async def test_a_running_job_is_cancelled_by_its_worker(q: Any) -> None:
    job_id = await bring_to(q, "running")
    assert await q.cancel(job_id) == "requested"
    assert await q.cancel(job_id) == "requested"
    assert (await q.scripts.status(job_id)).cancel_requested
    assert await q.endings(job_id) == []


async def test_a_finished_job_stays_as_it_ended(q: Any) -> None:
    job_id = await bring_to(q, "done")
    assert await q.cancel(job_id) == "finished"
    assert [e.finish_reason for e in await q.endings(job_id)] == [FinishReason.STOP]


async def test_a_marked_job_that_is_handed_back_ends_at_once(q: Any) -> None:
    job_id = await bring_to(q, "running")
    await q.cancel(job_id)
    assert await q.scripts.release("a", [(job_id, 1, None)]) == 1
    assert [e.finish_reason for e in await q.endings(job_id)] == [FinishReason.CANCELLED]
    await q.assert_nothing_is_left()


async def test_a_cancel_that_races_an_end_gives_one_terminal_event(q: Any) -> None:
    for _ in range(20):
        await q.enqueue()
        [job] = (await q.claim("a")).claimed
        item = q.item(job, first=0, tokens=1, end=FinishReason.STOP)
        await asyncio.gather(q.cancel(job.job_id), q.publish("a", item))
        assert len(await q.endings(job.job_id)) == 1
    await q.assert_nothing_is_left()


async def test_an_unknown_job_is_unknown(q: Any) -> None:
    job_id = new_job_id()
    assert await q.cancel(job_id) == "unknown"
    assert (await q.scripts.expire(job_id, retention_ms=1)).outcome == "unknown"
    assert await q.scripts.status(job_id) is None
    with pytest.raises(InvalidRequestError, match="job_id"):
        await q.cancel("no such form")


@pytest.mark.parametrize("state", ["queued", "delayed", "released", "abandoned"])
async def test_a_reader_may_end_a_job_whose_deadline_passed(q: Any, state: str) -> None:
    job_id = await bring_to(q, state, deadline_ms=70_000)
    early = await q.scripts.expire(job_id, retention_ms=60_000)
    assert early.outcome == "waiting"
    assert 0 < early.deadline_in_ms <= 70_000
    await q.pass_deadline(job_id)
    for _ in range(2):
        assert (await q.scripts.expire(job_id, retention_ms=60_000)).outcome == "expired"
    assert (await q.claim("b")).claimed == ()
    assert [e.finish_reason for e in await q.endings(job_id)] == [FinishReason.EXPIRED]
    await q.assert_nothing_is_left()


async def test_a_job_that_runs_is_left_to_its_worker_when_its_deadline_passes(q: Any) -> None:
    job_id = await bring_to(q, "running", deadline_ms=60_000)
    await q.pass_deadline(job_id)
    reply = await q.scripts.expire(job_id, retention_ms=60_000)
    assert (reply.outcome, reply.deadline_in_ms) == ("running", 0)
    assert await q.endings(job_id) == []


async def test_a_job_without_a_deadline_does_not_expire(q: Any) -> None:
    job_id = await q.enqueue()
    reply = await q.scripts.expire(job_id, retention_ms=60_000)
    assert (reply.outcome, reply.deadline_in_ms) == ("waiting", None)
    await q.cancel(job_id)
    assert (await q.scripts.expire(job_id, retention_ms=60_000)).outcome == "finished"


async def test_a_job_that_its_worker_cannot_decode_is_a_dead_letter(q: Any) -> None:
    job_id = new_job_id()
    payload = b"\x81\xa1v\x02" + b"x" * 70_000
    await q.scripts.enqueue_payload(
        job_id,
        payload,
        digest="d",
        lane=Lane.HIGH,
        prompt_tokens=1,
        budget=1,
        queue_limit=10,
        retention_ms=60_000,
    )
    [job] = (await q.claim("a")).claimed
    for _ in range(2):  # the second is a retry
        assert await q.scripts.reject(
            "a",
            job_id,
            job.epoch,
            code=ErrorCode.UNSUPPORTED_VERSION,
            message="version 2",
            retention_ms=60_000,
        )
    [letter] = await q.scripts.dead_letters()
    assert (letter.kind, letter.job_id) == (DeadLetterKind.UNDECODABLE, job_id)
    assert (letter.lane, letter.reason) == (Lane.HIGH, "version 2")
    assert letter.payload == payload[:65536]
    [end] = await q.endings(job_id)
    assert (end.error.code, end.error.message) == (ErrorCode.UNSUPPORTED_VERSION, "version 2")
    await q.assert_nothing_is_left()
