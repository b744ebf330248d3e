"""What the claimer tells of a claim, and how it ends."""

from __future__ import annotations

import asyncio
import time

from inferq.protocol.keys import Lane, QueueKeys, new_job_id
from inferq.protocol.messages import Job, TextPrompt
from inferq.protocol.params import SamplingParams
from inferq.protocol.replies import ClaimedJob
from inferq.protocol.scripts import QueueScripts
from inferq.worker.queue.claimer import Claimer, ClaimLimits
from inferq.worker.queue.running import RunningJobs

LIMITS = ClaimLimits(
    max_model_len=1000,
    block_size=16,
    lease_ms=5000,
    max_crashes=3,
    retention_ms=60_000,
    starve_ms=2000,
)


async def test_a_lease_counts_from_before_a_claim_whose_reply_was_slow(
    valkey_client, queue: str, monkeypatch
) -> None:
    keys = QueueKeys(queue)
    scripts = QueueScripts(valkey_client, keys)
    job = Job(new_job_id(), TextPrompt("x"), SamplingParams(seed=0))
    await scripts.enqueue(
        job, lane=Lane.NORMAL, prompt_tokens=1, budget=16, queue_limit=10, retention_ms=60_000
    )
    claim = scripts.claim
    granted: list[float] = []

    async def slow_claim(*args, **kwargs):
        reply = await claim(*args, **kwargs)
        granted.append(time.monotonic())
        await asyncio.sleep(0.3)
        return reply

    monkeypatch.setattr(scripts, "claim", slow_claim)
    taken: asyncio.Queue[tuple[ClaimedJob, float]] = asyncio.Queue()
    claimer = Claimer(
        valkey_client,
        scripts,
        keys,
        "w1",
        RunningJobs(1000, 16, 10),
        LIMITS,
        on_claimed=lambda claimed, sent_at: taken.put_nowait((claimed, sent_at)),
    )
    running = asyncio.create_task(claimer.run())
    async with asyncio.timeout(10):
        claimed, sent_at = await taken.get()
        claimer.stop()
        await running
    assert claimed.job_id == job.id
    assert sent_at <= granted[0]
