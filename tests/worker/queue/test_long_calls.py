"""What travels between a worker and its server is cut into pieces that a link can carry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio

from inferq.protocol import stream_pages
from inferq.protocol.keys import Lane, QueueKeys, new_job_id
from inferq.protocol.messages import Event, FinishReason, Job, Terminal, TextPrompt
from inferq.protocol.output_log import JobLog
from inferq.protocol.params import SamplingParams
from inferq.protocol.replies import ClaimedJob, PublishItem
from inferq.protocol.scripts import QueueScripts
from inferq.worker.queue import claimer, publisher
from inferq.worker.queue.claimer import Claimer, ClaimLimits
from inferq.worker.queue.publisher import Publisher
from inferq.worker.queue.replay import read_published
from inferq.worker.queue.running import RunningJob, RunningJobs

#: So long that nothing but what is tested ends a wait.
LONG_S = 3600.0
LIMITS = ClaimLimits(
    max_model_len=1000,
    block_size=16,
    lease_ms=round(LONG_S * 1000),
    max_crashes=3,
    retention_ms=round(3 * LONG_S * 1000),
    starve_ms=2000,
)


@pytest.fixture
async def scripts(valkey_client: redis.asyncio.Redis, queue: str) -> AsyncIterator[QueueScripts]:
    keys = QueueKeys(queue)
    yield QueueScripts(valkey_client, keys)
    async for key in valkey_client.scan_iter(match=f"{keys.prefix}*", count=1000):
        await valkey_client.delete(key)


@pytest.fixture
def submit(scripts: QueueScripts) -> Callable[..., Any]:
    async def one(size: int = 1) -> str:
        job = Job(new_job_id(), TextPrompt("x" * size), SamplingParams(truncate_prompt_tokens=1))
        await scripts.enqueue(
            job,
            lane=Lane.NORMAL,
            prompt_tokens=1,
            budget=15,
            queue_limit=100,
            retention_ms=60_000,
        )
        return job.id

    return one


@pytest.fixture
def claim(scripts: QueueScripts) -> Callable[..., Any]:
    async def some(count: int) -> list[RunningJob]:
        reply = await scripts.claim(
            "w",
            free_tokens=10**6,
            idle=True,
            max_jobs=count,
            max_model_len=LIMITS.max_model_len,
            block_size=LIMITS.block_size,
            lease_ms=LIMITS.lease_ms,
            max_crashes=LIMITS.max_crashes,
            retention_ms=LIMITS.retention_ms,
        )
        return [_running(job) for job in reply.claimed]

    return some


def _running(claimed: ClaimedJob) -> RunningJob:
    return RunningJob(
        id=claimed.job_id,
        epoch=claimed.epoch,
        lane=claimed.lane,
        attempts=claimed.attempts,
        queued_ms=claimed.queued_ms,
        reserved=claimed.space,
        claimed_at=0.0,
        lease_until=1e12,
    )


async def test_a_claimer_goes_on_at_once_until_all_is_taken(
    scripts: QueueScripts,
    submit: Callable[..., Any],
    valkey_client: redis.asyncio.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claimer, "MAX_SLEEP_S", LONG_S)
    ids = [await submit(700_000) for _ in range(6)]
    jobs = RunningJobs(1_000_000, 16, 100)
    taken: list[str] = []
    all_taken = asyncio.Event()

    def take(claimed: ClaimedJob, sent_at: float) -> None:
        jobs.add(_running(claimed))
        taken.append(claimed.job_id)
        if len(taken) == len(ids):
            all_taken.set()

    async def never(tails: object) -> bool:  # what a reply says is due is all that wakes it
        return await asyncio.Event().wait()

    running = Claimer(valkey_client, scripts, scripts.keys, "w", jobs, LIMITS, on_claimed=take)
    monkeypatch.setattr(running, "_wait_arrival", never)
    task = asyncio.create_task(running.run())
    async with asyncio.timeout(30):
        await all_taken.wait()
        running.stop()
        await task
    assert taken == ids
    assert {(await scripts.status(job_id)).handoffs for job_id in ids} == {0}


class Calls:
    """A publisher's calls: the items of each."""

    def __init__(self, scripts: QueueScripts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.items: list[list[PublishItem]] = []
        publish = scripts.publish

        async def kept(worker: str, items: list[PublishItem], **options: Any) -> Any:
            self.items.append(list(items))
            return await publish(worker, items, **options)

        monkeypatch.setattr(scripts, "publish", kept)

    @property
    def sizes(self) -> list[list[int]]:
        """The bytes of each event of each call."""
        return [[len(data) for i in items for _, data in i.events] for items in self.items]


async def publish_all(scripts: QueueScripts, jobs: list[RunningJob]) -> list[RunningJob]:
    """Publish what there is of the jobs; return them in the order of their ends."""
    registry = RunningJobs(1_000_000, 16, 100)
    ended: list[RunningJob] = []

    def fail(job: RunningJob, why: str = "") -> None:
        raise AssertionError((job, why))

    running = Publisher(
        scripts,
        "w",
        registry,
        lease_s=LONG_S,
        retention_s=60,
        on_published=ended.append,
        on_lost=fail,
        on_cancel=fail,
    )
    for job in jobs:
        registry.add(job)
        running.mark_dirty(job)
    task = asyncio.create_task(running.run())
    async with asyncio.timeout(30):
        await running.flushed()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return ended


async def read_events(scripts: QueueScripts, job_id: str) -> list[Event]:
    entries = await scripts._redis.xrange(scripts.keys.out(job_id))
    return [Event.decode(fields[b"e"]) for _, fields in entries]


async def test_a_publish_ends_with_the_event_that_fills_it(
    scripts: QueueScripts,
    submit: Callable[..., Any],
    claim: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(7):
        await submit()
    jobs = await claim(7)
    for number, job in enumerate(jobs):
        job.log.append(number, "x" * 400_000, None)
        job.terminal = Terminal(FinishReason.LENGTH)
    calls = Calls(scripts, monkeypatch)
    assert await publish_all(scripts, jobs) == jobs
    assert [len(items) for items in calls.items] == [3, 3, 1]
    assert all(sum(sizes[:-1]) < publisher.MAX_BYTES_PER_CALL for sizes in calls.sizes)
    for number, job in enumerate(jobs):
        [event] = await read_events(scripts, job.id)
        assert event.token_ids == (number,)
        assert event.terminal is not None


async def test_short_events_of_many_jobs_travel_in_one_call(
    scripts: QueueScripts,
    submit: Callable[..., Any],
    claim: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(50):
        await submit()
    jobs = await claim(50)
    for job in jobs:
        job.log.append(1, "x", None)
    calls = Calls(scripts, monkeypatch)
    assert await publish_all(scripts, jobs) == []
    assert [len(items) for items in calls.items] == [50]


async def test_a_job_longer_than_a_call_is_published_in_several_and_ends_with_the_last(
    scripts: QueueScripts,
    submit: Callable[..., Any],
    claim: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that publishes at its end only: all its outputs are there at once."""
    monkeypatch.setattr(publisher, "MAX_BYTES_PER_CALL", 4_000)
    monkeypatch.setattr("inferq.protocol.output_log.MAX_EVENT_TOKENS", 16)
    await submit()
    await submit()
    [job, other] = await claim(2)
    candidates = JobLog(3)
    for index in range(3):
        for token in range(400):
            candidates.append(token, "some text ", None, index)
        candidates.outputs[index].finish_reason = FinishReason.LENGTH
    job.log = candidates.best([2, 0, 1])
    job.terminal = Terminal(FinishReason.LENGTH)
    job.unsent_since = 1.0
    other.log.append(7, "other", None)
    calls = Calls(scripts, monkeypatch)
    assert await publish_all(scripts, [job, other]) == [job]
    assert len(calls.items) > 2
    assert max(map(sum, calls.sizes)) < 4_000 + 1_000
    assert [i.job_id for items in calls.items[:2] for i in items] == [job.id, other.id, job.id]
    ends = [i.terminal for items in calls.items for i in items if i.job_id == job.id]
    assert ends == [*[None] * (len(ends) - 1), FinishReason.LENGTH]
    events = await read_events(scripts, job.id)
    assert [event.terminal is not None for event in events].count(True) == 1
    copy = JobLog(3)
    for event in events:
        copy.replay(event)
    assert [output.token_ids for output in copy.outputs] == [list(range(400))] * 3
    assert {output.text for output in copy.outputs} == {"some text " * 400}
    assert [event.index for event in events] == sorted(event.index for event in events)


async def test_the_delay_of_what_is_left_counts_from_when_it_was_there(
    scripts: QueueScripts,
    submit: Callable[..., Any],
    claim: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inferq.protocol.output_log.MAX_EVENT_TOKENS", 1)
    await submit()
    [job] = await claim(1)
    for token in range(3):
        job.log.append(token, "x", None)
    item = job.unsent(1)
    assert (len(item.events), item.terminal, job.has_more_than(item)) == (1, None, True)
    job.unsent_since = 5.0
    assert publisher._taken_since(job, item, 9.0) == 5.0
    assert job.unsent_since == 5.0
    whole = job.unsent(1000)
    assert not job.has_more_than(whole)
    assert publisher._taken_since(job, whole, 9.0) == 5.0
    assert job.unsent_since is None
    job.terminal = Terminal(FinishReason.STOP)
    assert job.has_more_than(whole)


async def test_what_was_published_is_read_back_page_by_page(
    scripts: QueueScripts,
    submit: Callable[..., Any],
    claim: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("inferq.protocol.output_log.MAX_EVENT_TOKENS", 1)
    monkeypatch.setattr(stream_pages, "PAGE_BYTES", 5_000)
    job_id = await submit()
    [job] = await claim(1)
    for token in range(60):
        job.log.append(token, "x" * 1000, None)
    await publish_all(scripts, [job])
    client, replies = scripts._redis, []
    xrange = client.xrange

    async def watched(*args: Any, **kwargs: Any) -> Any:
        rows = await xrange(*args, **kwargs)
        replies.append(len(rows))
        return rows

    monkeypatch.setattr(client, "xrange", watched)
    log = await read_published(client, scripts.keys, job_id, total=60, num_outputs=1)
    assert log.outputs[0].token_ids == list(range(60))
    assert log.outputs[0].text == "x" * 60_000
    assert max(replies) == 4
    assert sum(replies) == 60
