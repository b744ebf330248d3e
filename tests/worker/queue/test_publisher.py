"""Publishing and leases against a real server: fences, lost tails, cancels, lost connections."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from inferq.protocol.errors import DecodeError, ServerLost
from inferq.protocol.keys import Lane, QueueKeys, new_job_id
from inferq.protocol.messages import Event, FinishReason, Job, Terminal, TextPrompt
from inferq.protocol.output_log import JobLog
from inferq.protocol.params import SamplingParams
from inferq.protocol.scripts import QueueScripts
from inferq.worker.queue.lease import LeaseKeeper
from inferq.worker.queue.publisher import Publisher
from inferq.worker.queue.replay import read_published
from inferq.worker.queue.running import RunningJob, RunningJobs

LEASE_S = 1.0


@dataclass
class Desk:
    """A publisher whose reports are kept."""

    scripts: QueueScripts
    keys: QueueKeys
    jobs: RunningJobs
    published: list[RunningJob] = field(default_factory=list)
    lost: list[tuple[RunningJob, str]] = field(default_factory=list)
    cancelled: list[RunningJob] = field(default_factory=list)
    overdue: list[RunningJob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.publisher = Publisher(
            self.scripts,
            "w1",
            self.jobs,
            lease_s=LEASE_S,
            retention_s=60,
            on_published=self._on_published,
            on_lost=self._on_lost,
            on_cancel=self.cancelled.append,
        )

    def _on_published(self, job: RunningJob) -> None:
        self.published.append(job)
        self.jobs.remove(job)

    def _on_lost(self, job: RunningJob, why: str) -> None:
        self.lost.append((job, why))
        self.jobs.remove(job)

    async def claim(self, worker: str = "w1") -> RunningJob:
        reply = await self.scripts.claim(
            worker,
            free_tokens=1000,
            idle=True,
            max_jobs=1,
            max_model_len=1000,
            block_size=16,
            lease_ms=round(LEASE_S * 1000),
            max_crashes=3,
            retention_ms=60_000,
        )
        [claimed] = reply.claimed
        now = time.monotonic()
        job = RunningJob(
            id=claimed.job_id,
            epoch=claimed.epoch,
            lane=claimed.lane,
            attempts=claimed.attempts,
            queued_ms=claimed.queued_ms,
            reserved=0,
            claimed_at=now,
            lease_until=now + LEASE_S,
            acknowledged=claimed.published,
        )
        if worker == "w1":
            self.jobs.add(job)
        return job

    async def submit(self) -> str:
        job = Job(new_job_id(), TextPrompt("x"), SamplingParams(seed=0))
        await self.scripts.enqueue(
            job,
            lane=Lane.NORMAL,
            prompt_tokens=1,
            budget=16,
            queue_limit=10,
            retention_ms=60_000,
        )
        return job.id

    async def events(self, job_id: str) -> list[Event]:
        entries = await self.scripts._redis.xrange(self.keys.out(job_id))
        return [Event.decode(fields[b"e"]) for _, fields in entries]


async def stop(task: asyncio.Task[None]) -> None:
    """Cancel until it is over: a call that completes just then swallows a cancel."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.5)


@pytest.fixture
async def desk(valkey_client, queue: str):
    keys = QueueKeys(queue)
    made = Desk(QueueScripts(valkey_client, keys), keys, RunningJobs(1000, 16, 10))
    task = asyncio.create_task(made.publisher.run())
    yield made
    await stop(task)


async def test_tokens_and_end_reach_the_stream_once(desk: Desk) -> None:
    job_id = await desk.submit()
    job = await desk.claim()
    for i in range(3):
        job.log.append(i, "ab", None)
        desk.publisher.mark_dirty(job)
        await desk.publisher.flushed()
    job.terminal = Terminal(FinishReason.LENGTH)
    desk.publisher.mark_dirty(job)
    await desk.publisher.flushed()
    assert desk.published == [job]
    events = await desk.events(job_id)
    assert [t for e in events for t in e.token_ids] == [0, 1, 2]
    assert [e.terminal is not None for e in events] == [False, False, False, True]


async def test_tokens_that_wait_for_a_call_share_one_event(desk: Desk) -> None:
    job_id = await desk.submit()
    job = await desk.claim()
    for i in range(50):
        job.log.append(i, "a", None)
        desk.publisher.mark_dirty(job)
    await desk.publisher.flushed()
    [event] = await desk.events(job_id)
    assert event.token_ids == tuple(range(50))


async def test_a_job_taken_over_is_reported_lost_and_not_published(
    desk: Desk, valkey_client
) -> None:
    job_id = await desk.submit()
    job = await desk.claim()
    await valkey_client.zadd(desk.keys.leases, {job_id: 1})
    other = await desk.claim("w2")
    assert other.epoch == job.epoch + 1
    job.log.append(1, "stale", None)
    desk.publisher.mark_dirty(job)
    await desk.publisher.flushed()
    assert [lost for lost, _ in desk.lost] == [job]
    assert await desk.events(job_id) == []


async def test_a_server_that_lost_its_tail_is_sent_the_rest_again(
    desk: Desk, valkey_client
) -> None:
    job_id = await desk.submit()
    job = await desk.claim()
    for i in range(6):
        job.log.append(i, str(i), None)
        desk.publisher.mark_dirty(job)
        await desk.publisher.flushed()
    # what a restart from an older file leaves behind
    await valkey_client.xtrim(desk.keys.out(job_id), maxlen=0)
    await valkey_client.delete(desk.keys.out(job_id))
    await valkey_client.hset(desk.keys.job(job_id), "offset", 2)
    job.log.append(6, "6", None)
    desk.publisher.mark_dirty(job)
    await desk.publisher.flushed()
    [event] = await desk.events(job_id)
    assert (event.offset, event.token_ids, event.text) == (2, (2, 3, 4, 5, 6), "23456")


async def test_several_outputs_share_a_stream_and_survive_lost_replies_and_tails(
    desk: Desk, valkey_client, monkeypatch
) -> None:
    job_id = await desk.submit()
    job = await desk.claim()
    job.log = JobLog(3)
    publish, lost = desk.scripts.publish, False

    async def forgetful(*args, **kwargs):
        replies = await publish(*args, **kwargs)
        if lost:
            raise ServerLost("the reply was lost")
        return replies

    monkeypatch.setattr(desk.scripts, "publish", forgetful)
    for step in range(6):
        for index in (2, 0, 1):
            job.log.append(10 * index + step, f"{index}{step} ", None, index)
        lost = step in (1, 3)
        desk.publisher.mark_dirty(job)
        await asyncio.sleep(0.02)
        lost = False
        await desk.publisher.flushed()
        if step == 4:  # a restart from an older file: the last publish is gone
            last = (await valkey_client.xrevrange(desk.keys.out(job_id), count=3))[0][0]
            total = int(last.split(b"-")[0]) - 3
            kept = await valkey_client.xrange(desk.keys.out(job_id), max=f"{total}-1")
            await valkey_client.delete(desk.keys.out(job_id))
            for entry, fields in kept:
                await valkey_client.xadd(desk.keys.out(job_id), fields, id=entry)
            await valkey_client.hset(desk.keys.job(job_id), "offset", total)
    for index in range(3):
        job.log.outputs[index].finish_reason = FinishReason.LENGTH
    job.terminal = Terminal(FinishReason.LENGTH)
    desk.publisher.mark_dirty(job)
    await desk.publisher.flushed()
    events = await desk.events(job_id)
    for index in range(3):
        own = [e for e in events if e.index == index]
        assert [t for e in own for t in e.token_ids] == [10 * index + step for step in range(6)]
        assert "".join(e.text for e in own) == "".join(f"{index}{step} " for step in range(6))
    assert [e.terminal is not None for e in events].count(True) == 1
    copy = JobLog(3)
    for event in events:
        copy.replay(event)
    assert [o.token_ids for o in copy.outputs] == [o.token_ids for o in job.log.outputs]


async def test_what_was_published_is_read_back_and_a_damaged_stream_refused(
    desk: Desk, valkey_client
) -> None:
    job_id = await desk.submit()
    job = await desk.claim()
    job.log = JobLog(2)
    for step in range(2):
        job.log.append(step, "a", None, 0)
        job.log.append(10 + step, "b", None, 1)
    job.log.outputs[1].finish_reason = FinishReason.STOP
    job.log.outputs[1].stop_reason = "b"
    desk.publisher.mark_dirty(job)
    await desk.publisher.flushed()
    log = await read_published(valkey_client, desk.keys, job_id, total=4, num_outputs=2)
    assert [o.token_ids for o in log.outputs] == [[0, 1], [10, 11]]
    assert [o.is_finished for o in log.outputs] == [False, True]
    assert log.outputs[1].stop_reason == "b"
    assert log.events(4, None) == []
    for total, outputs in ((5, 2), (4, 1)):
        with pytest.raises(DecodeError):
            await read_published(valkey_client, desk.keys, job_id, total=total, num_outputs=outputs)


async def test_a_cancel_mark_is_reported_with_the_next_publish(desk: Desk) -> None:
    job_id = await desk.submit()
    job = await desk.claim()
    await desk.scripts.cancel(job_id, retention_ms=60_000)
    job.log.append(1, "a", None)
    desk.publisher.mark_dirty(job)
    await desk.publisher.flushed()
    assert desk.cancelled == [job]


async def test_an_outage_is_ridden_out_while_the_lease_lasts_and_ends_the_job_after(
    desk: Desk, monkeypatch
) -> None:
    job_id = await desk.submit()
    job = await desk.claim()
    publish, outage = desk.scripts.publish, True

    async def broken(*args, **kwargs):
        if outage:
            raise ServerLost("cut off")
        return await publish(*args, **kwargs)

    monkeypatch.setattr(desk.scripts, "publish", broken)
    job.log.append(1, "a", None)
    desk.publisher.mark_dirty(job)
    await asyncio.sleep(0.2)
    assert desk.lost == []
    outage = False
    await desk.publisher.flushed()
    assert len(await desk.events(job_id)) == 1

    outage = True
    job.log.append(2, "b", None)
    desk.publisher.mark_dirty(job)
    await asyncio.sleep(LEASE_S + 1.5)  # a pause between two tries is a second at most
    assert [lost for lost, _ in desk.lost] == [job]
    assert "lease ended" in desk.lost[0][1]


@pytest.mark.parametrize("stuck", [False, True])
async def test_leases_are_renewed_unless_the_engine_is_stuck(desk: Desk, stuck: bool) -> None:
    await desk.submit()
    job = await desk.claim()
    keeper = LeaseKeeper(
        desk.scripts,
        "w1",
        desk.jobs,
        lease_s=LEASE_S,
        retention_s=60,
        is_stuck=lambda: stuck,
        on_lost=desk._on_lost,
        on_cancel=desk.cancelled.append,
        on_deadline=desk.overdue.append,
    )
    task = asyncio.create_task(keeper.run())
    await asyncio.sleep(2 * LEASE_S)
    await stop(task)
    assert [lost for lost, _ in desk.lost] == ([job] if stuck else [])


async def test_a_deadline_is_reported_when_it_passes(desk: Desk) -> None:
    await desk.submit()
    job = await desk.claim()
    job.deadline = time.monotonic() + 0.3

    def end(job: RunningJob) -> None:
        desk.overdue.append(job)
        job.terminal = Terminal(FinishReason.EXPIRED)

    keeper = LeaseKeeper(
        desk.scripts,
        "w1",
        desk.jobs,
        lease_s=LEASE_S,
        retention_s=60,
        is_stuck=lambda: False,
        on_lost=desk._on_lost,
        on_cancel=desk.cancelled.append,
        on_deadline=end,
    )
    task = asyncio.create_task(keeper.run())
    await asyncio.sleep(0.5)
    await stop(task)
    assert desk.overdue == [job]


async def test_leases_and_deadlines_end_in_time_although_a_heartbeat_hangs(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.submit()
    job = await desk.claim()
    job.deadline = time.monotonic() + LEASE_S / 2

    async def hang(*args: object, **kwargs: object) -> None:
        await asyncio.sleep(60)

    def end(job: RunningJob) -> None:
        desk.overdue.append(job)
        job.terminal = Terminal(FinishReason.EXPIRED)

    monkeypatch.setattr(desk.scripts, "heartbeat", hang)
    keeper = LeaseKeeper(
        desk.scripts,
        "w1",
        desk.jobs,
        lease_s=LEASE_S,
        retention_s=60,
        is_stuck=lambda: False,
        on_lost=desk._on_lost,
        on_cancel=desk.cancelled.append,
        on_deadline=end,
    )
    task = asyncio.create_task(keeper.run())
    await asyncio.sleep(LEASE_S + 0.3)
    await stop(task)
    assert desk.overdue == [job]
    assert [lost for lost, _ in desk.lost] == [job]


async def test_waiting_for_one_job_does_not_wait_for_others_that_never_rest(desk: Desk) -> None:
    await desk.submit()
    busy = await desk.claim()
    job_id = await desk.submit()
    quiet = await desk.claim()

    async def talk() -> None:
        while True:  # always faster than a publish call
            busy.log.append(1, "x", None)
            desk.publisher.mark_dirty(busy)
            await asyncio.sleep(0.0002)

    talking = asyncio.create_task(talk())
    await asyncio.sleep(0.05)
    quiet.log.append(7, "quiet", None)
    desk.publisher.mark_dirty(quiet)
    async with asyncio.timeout(5):
        await desk.publisher.flushed([quiet])
    assert not talking.done()
    [event] = await desk.events(job_id)
    assert event.text == "quiet"
    await stop(talking)
