"""Times that fall due while a part of the worker sleeps until a later one."""

from __future__ import annotations

import asyncio
import contextlib
import time

from inferq.protocol.keys import Lane, QueueKeys, new_job_id
from inferq.protocol.messages import Job, TextPrompt
from inferq.protocol.params import SamplingParams
from inferq.protocol.replies import PublishReply, PublishStatus
from inferq.protocol.scripts import QueueScripts
from inferq.worker.queue.claimer import Claimer, ClaimLimits
from inferq.worker.queue.lease import LeaseKeeper
from inferq.worker.queue.running import RunningJob, RunningJobs

LEASE_S = 60.0
LIMITS = ClaimLimits(
    max_model_len=1000,
    block_size=16,
    lease_ms=round(LEASE_S * 1000),
    max_crashes=3,
    retention_ms=60_000,
    starve_ms=2000,
)


def running_job(*, lease_s: float = LEASE_S, deadline_s: float | None = None) -> RunningJob:
    now = time.monotonic()
    return RunningJob(
        id=new_job_id(),
        epoch=1,
        lane=Lane.NORMAL,
        attempts=1,
        queued_ms=0,
        reserved=16,
        claimed_at=now,
        lease_until=now + lease_s,
        deadline=None if deadline_s is None else now + deadline_s,
    )


async def ends_of(valkey_client, queue: str, late: RunningJob, within_s: float) -> list[str]:
    """Return the ends told when `late` is taken in while the keeper sleeps until its next beat."""
    jobs = RunningJobs(1000, 16, 10)
    jobs.add(running_job())
    told: list[str] = []
    has_ended = asyncio.Event()

    def end(job: RunningJob, *why: str) -> None:
        told.append("lost" if why else "deadline")
        jobs.remove(job)
        has_ended.set()

    keeper = LeaseKeeper(
        QueueScripts(valkey_client, QueueKeys(queue)),
        "w1",
        jobs,
        lease_s=LEASE_S,
        retention_s=60,
        is_stuck=lambda: False,
        on_lost=end,
        on_cancel=end,
        on_deadline=end,
    )
    keeping = asyncio.create_task(keeper.run())
    await asyncio.sleep(0.1)
    jobs.add(late)
    try:
        async with asyncio.timeout(within_s):
            await has_ended.wait()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    assert late not in jobs
    return told


async def test_a_nearer_deadline_of_a_job_taken_in_later_is_kept(valkey_client, queue: str) -> None:
    late = running_job(deadline_s=0.4)
    assert await ends_of(valkey_client, queue, late, 5) == ["deadline"]
    assert time.monotonic() >= late.deadline


async def test_a_nearer_end_of_a_lease_taken_in_later_is_kept(valkey_client, queue: str) -> None:
    late = running_job(lease_s=0.4)  # of a claim whose reply was slow
    assert await ends_of(valkey_client, queue, late, 5) == ["lost"]
    assert time.monotonic() >= late.lease_until


async def test_a_keeper_ends_although_a_heartbeat_swallows_a_cancel(
    valkey_client, queue: str, monkeypatch
) -> None:
    jobs = RunningJobs(1000, 16, 10)
    jobs.add(running_job(lease_s=0.4))
    scripts = QueueScripts(valkey_client, QueueKeys(queue))
    is_beating = asyncio.Event()

    async def heartbeat(*args, **kwargs) -> list[PublishReply]:
        is_beating.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return [PublishReply("", PublishStatus.OK, 0, cancel=False)]

    monkeypatch.setattr(scripts, "heartbeat", heartbeat)
    keeper = LeaseKeeper(
        scripts,
        "w1",
        jobs,
        lease_s=0.4,
        retention_s=60,
        is_stuck=lambda: False,
        on_lost=lambda *_: None,
        on_cancel=jobs.remove,
        on_deadline=jobs.remove,
    )
    keeping = asyncio.create_task(keeper.run())
    async with asyncio.timeout(5):
        await is_beating.wait()
    keeping.cancel()
    done, _ = await asyncio.wait([keeping], timeout=5)
    assert done == {keeping}
    assert keeping.cancelled()


async def test_a_job_delayed_while_a_worker_sleeps_is_claimed_soon_after_it_is_due(
    valkey_client, queue: str
) -> None:
    keys = QueueKeys(queue)
    scripts = QueueScripts(valkey_client, keys)
    taken: asyncio.Queue[str] = asyncio.Queue()
    claimer = Claimer(
        valkey_client,
        scripts,
        keys,
        "w1",
        RunningJobs(1000, 16, 10),
        LIMITS,
        on_claimed=lambda claimed, _: taken.put_nowait(claimed.job_id),
    )
    running = asyncio.create_task(claimer.run())
    await asyncio.sleep(0.1)
    job = Job(new_job_id(), TextPrompt("x"), SamplingParams(seed=0))
    sent_at = time.monotonic()
    await scripts.enqueue(
        job,
        lane=Lane.NORMAL,
        prompt_tokens=1,
        budget=16,
        queue_limit=10,
        retention_ms=60_000,
        delay_ms=150,
    )
    async with asyncio.timeout(5):
        assert await taken.get() == job.id
    assert time.monotonic() - sent_at >= 0.15
    claimer.stop()
    await running
