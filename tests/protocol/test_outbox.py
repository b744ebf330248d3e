"""The outbox: every way in which a job with a webhook ends puts its end there, once."""

from __future__ import annotations

from typing import Any

import pytest
import redis.asyncio

import inferq.protocol.scripts
from inferq.protocol.errors import DecodeError, InvalidRequestError, QueueFull
from inferq.protocol.upkeep import UpkeepScripts
from inferq.protocol.webhooks import Webhook, WebhookEvent

WEBHOOK = Webhook("https://example.com/hook?a=1", events=("job.failed",), secret="team.a")


@pytest.fixture
def upkeep(redis_client: redis.asyncio.Redis, q: Any) -> UpkeepScripts:
    return UpkeepScripts(redis_client, q.keys)


async def ends(upkeep: UpkeepScripts) -> list[tuple[str, str]]:
    entries = await upkeep.outbox(count=100)
    assert all(Webhook.decode(entry.hook) == WEBHOOK for entry in entries)
    return [(entry.job_id, entry.finish_reason) for entry in entries]


async def test_a_published_end_is_put_aside(q: Any, upkeep: UpkeepScripts) -> None:
    job_id = await q.enqueue(webhook=WEBHOOK)
    await q.enqueue()
    jobs = (await q.claim()).claimed
    assert await ends(upkeep) == []
    for job in jobs:
        await q.end("a", job)
        await q.end("a", job)
    assert await ends(upkeep) == [(job_id, "stop")]


async def test_a_cancelled_and_an_expired_job_are_put_aside(q: Any, upkeep: UpkeepScripts) -> None:
    cancelled = await q.enqueue(webhook=WEBHOOK)
    expired = await q.enqueue(webhook=WEBHOOK, deadline_ms=60_000)
    await q.cancel(cancelled)
    await q.pass_deadline(expired)
    await q.scripts.expire(expired, retention_ms=60_000)
    assert await ends(upkeep) == [(cancelled, "cancelled"), (expired, "expired")]


async def test_a_rejected_job_is_put_aside(q: Any, upkeep: UpkeepScripts) -> None:
    job_id = await q.enqueue(webhook=WEBHOOK)
    [job] = (await q.claim()).claimed
    await q.scripts.reject(
        "a", job_id, job.epoch, code="undecodable", message="no", retention_ms=60_000
    )
    assert await ends(upkeep) == [(job_id, "error")]
    event = await upkeep.last_event(job_id)
    assert event is not None
    assert event.terminal is not None
    assert event.terminal.error is not None
    assert event.terminal.error.code == "undecodable"


async def test_a_crashed_job_is_put_aside_and_its_redrive_again(
    q: Any, upkeep: UpkeepScripts
) -> None:
    job_id = await q.enqueue(webhook=WEBHOOK)
    await q.claim(max_crashes=1)
    await q.end_lease(job_id)
    await q.claim(max_crashes=1)
    assert await ends(upkeep) == [(job_id, "error")]
    [letter] = await q.scripts.dead_letters()
    again = await q.scripts.redrive(letter.entry_id)
    [job] = (await q.claim()).claimed
    await q.end("a", job)
    assert await ends(upkeep) == [(job_id, "error"), (again, "stop")]


async def test_what_is_removed_is_gone(q: Any, upkeep: UpkeepScripts) -> None:
    for _ in range(3):
        await q.cancel(await q.enqueue(webhook=WEBHOOK))
    first, second = await upkeep.outbox(count=2)
    await upkeep.remove_from_outbox([first.entry_id, second.entry_id])
    await upkeep.remove_from_outbox([first.entry_id])
    assert len(await upkeep.outbox(count=9)) == 1


async def test_a_full_outbox_refuses_jobs_with_a_webhook_only(
    q: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inferq.protocol.scripts, "MAX_OUTBOX", 1)
    await q.cancel(await q.enqueue(webhook=WEBHOOK))
    with pytest.raises(QueueFull, match="webhooks") as caught:
        await q.enqueue(webhook=WEBHOOK)
    assert (caught.value.depth, caught.value.limit) == (1, 1)
    await q.enqueue()
    assert (await q.scripts.load()).queued == 1


async def test_delayed_jobs_that_are_due_are_promoted_without_a_worker(
    q: Any, upkeep: UpkeepScripts
) -> None:
    due, waiting, late = [
        await q.enqueue(delay_ms=50_000, deadline_ms=60_000 if k == 2 else None) for k in range(3)
    ]
    await q.pass_delay(due)
    await q.pass_delay(late)
    await q.pass_deadline(late)
    assert await upkeep.promote(retention_ms=60_000) == 2
    assert await upkeep.promote(retention_ms=60_000) == 0
    assert [(await q.scripts.status(job_id)).state for job_id in (due, waiting, late)] == [
        "queued", "delayed", "done",
    ]  # fmt: skip
    load = await q.scripts.load()
    assert (load.queued, load.delayed) == (1, 1)
    [job] = (await q.claim()).claimed
    assert job.job_id == due


async def test_wrong_counters_are_counted_anew(q: Any, upkeep: UpkeepScripts) -> None:
    for _ in range(40):
        await q.enqueue(prompt=3, budget=4)
    await q.enqueue(prompt=3, budget=4, delay_ms=60_000)
    await q.cancel(await q.enqueue())
    await q.claim(max_jobs=5)
    right = await q.scripts.load()
    assert await upkeep.recount() == 0
    await q.redis.hset(q.keys.load, mapping={"queued": 7, "budget_tokens": -9})
    assert await upkeep.recount(limit=3) is None
    assert await upkeep.recount() == 2
    assert await q.scripts.load() == right
    assert (right.queued, right.running, right.delayed) == (35, 5, 1)


async def test_old_dead_letters_are_trimmed(q: Any, upkeep: UpkeepScripts) -> None:
    await q.redis.xadd(q.keys.dead, {"kind": "undecodable"}, id="1000-0")
    await q.redis.xadd(q.keys.dead, {"kind": "undecodable"})
    assert await upkeep.trim_dead_letters(age_ms=60_000) == 1
    assert await upkeep.trim_dead_letters(age_ms=60_000) == 0
    assert await q.redis.xlen(q.keys.dead) == 1


def test_a_webhook_travels_whole() -> None:
    assert Webhook.decode(WEBHOOK.encode()) == WEBHOOK
    assert Webhook("http://h").events == tuple(WebhookEvent)
    assert Webhook("http://h", events=["job.failed", "job.failed"]).events == (  # type: ignore[arg-type]
        "job.failed",
    )


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("url", {"url": "ftp://example.com"}),
        ("url", {"url": "https://"}),
        ("url", {"url": "//example.com"}),
        ("url", {"url": "https://user:pw@example.com"}),
        ("url", {"url": "https://example.com/#x"}),
        ("url", {"url": "https://example.com:0"}),
        ("url", {"url": "https://example.com:99999"}),
        ("url", {"url": "https://[::1"}),
        ("url", {"url": "https://example.com/a b"}),
        ("url", {"url": "https://example.com/\r\nX: y"}),
        ("url", {"url": "https://exämple.com/"}),
        ("url", {"url": "https://example.com/" + "x" * 2048}),
        ("url", {"url": None}),
        ("events", {"events": ()}),
        ("events", {"events": ("job.done",)}),
        ("events", {"events": "job.failed"}),
        ("secret", {"secret": ""}),
        ("secret", {"secret": "a b"}),
        ("secret", {"secret": "x" * 65}),
    ],
)
def test_what_is_no_webhook_is_refused_by_field(field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Webhook(**({"url": "https://example.com"} | arguments))
    assert caught.value.field == f"webhook.{field}"


@pytest.mark.parametrize("payload", [b"", b"\x80", b"\x81\xa1u\xa1x", b"x" * 5000])
def test_what_is_no_encoded_webhook_is_undecodable(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        Webhook.decode(payload)
