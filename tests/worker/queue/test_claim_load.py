"""What a full worker costs the server: next to nothing, whatever waits or comes and goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from inferq.protocol.keys import Lane, QueueKeys, new_job_id
from inferq.protocol.messages import Job, TextPrompt
from inferq.protocol.params import SamplingParams
from inferq.protocol.scripts import QueueScripts
from inferq.worker.queue.claimer import Claimer, ClaimLimits
from inferq.worker.queue.running import RunningJob, RunningJobs

LIMITS = ClaimLimits(
    max_model_len=1000,
    block_size=16,
    lease_ms=5000,
    max_crashes=3,
    retention_ms=60_000,
    starve_ms=2000,
)


def busy_job() -> RunningJob:
    return RunningJob(
        id=new_job_id(),
        epoch=1,
        lane=Lane.NORMAL,
        attempts=1,
        queued_ms=0,
        reserved=16,
        claimed_at=0.0,
        lease_until=1e9,
    )


class FullWorker:
    """A claimer whose worker has no place but for errands, and how often it claimed."""

    def __init__(
        self, valkey_client, keys: QueueKeys, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        scripts = QueueScripts(valkey_client, keys)
        self.num_claims = 0
        claim = scripts.claim

        async def counted(*args, **kwargs):
            self.num_claims += 1
            return await claim(*args, **kwargs)

        monkeypatch.setattr(scripts, "claim", counted)
        self.jobs = RunningJobs(1000, 16, max_jobs=1)
        self.jobs.add(busy_job())
        self.taken: list[str] = []
        self.claimer = Claimer(
            valkey_client,
            scripts,
            keys,
            name,
            self.jobs,
            LIMITS,
            on_claimed=lambda claimed, _: self.taken.append(claimed.job_id),
        )


@pytest.fixture
async def full_worker(valkey_client, queue: str, monkeypatch: pytest.MonkeyPatch):
    worker = FullWorker(valkey_client, QueueKeys(queue), monkeypatch, "full")
    claiming = asyncio.create_task(worker.claimer.run())
    yield worker
    worker.claimer.stop()
    await claiming


@pytest.fixture
def submit(valkey_client, queue: str) -> Callable:
    scripts = QueueScripts(valkey_client, QueueKeys(queue))

    async def one(lane: Lane = Lane.NORMAL) -> None:
        await scripts.enqueue(
            Job(new_job_id(), TextPrompt("x"), SamplingParams(seed=0)),
            lane=lane,
            prompt_tokens=1,
            budget=16,
            queue_limit=10_000,
            retention_ms=60_000,
        )

    return one


async def claims_per_s(worker: FullWorker) -> float:
    before, began_at = worker.num_claims, time.monotonic()
    await asyncio.sleep(4.2)
    return (worker.num_claims - before) / (time.monotonic() - began_at)


async def test_a_full_worker_hardly_claims_while_a_backlog_waits(
    full_worker: FullWorker, submit: Callable
) -> None:
    for lane in (*Lane, *Lane):
        await submit(lane)
    await asyncio.sleep(0.5)
    assert await claims_per_s(full_worker) <= 1
    assert not full_worker.taken


async def test_a_full_worker_hardly_claims_from_a_queue_that_is_empty(
    full_worker: FullWorker,
) -> None:
    await asyncio.sleep(0.2)
    assert await claims_per_s(full_worker) <= 1


async def test_jobs_that_others_take_seldom_wake_a_full_worker(
    full_worker: FullWorker, submit: Callable, valkey_client, queue: str
) -> None:
    other = QueueScripts(valkey_client, QueueKeys(queue))
    before, began_at = full_worker.num_claims, time.monotonic()
    for i in range(100):
        await submit()
        reply = await other.claim(
            "other",
            free_tokens=10**6,
            idle=False,
            max_jobs=10,
            max_model_len=1000,
            block_size=16,
            lease_ms=60_000,
            max_crashes=3,
            retention_ms=60_000,
        )
        assert len(reply.claimed) == 1, i
        await asyncio.sleep(0.03)
    # six claims until the pause is a second, then one with each
    assert full_worker.num_claims - before <= 8 + 2 * (time.monotonic() - began_at)
