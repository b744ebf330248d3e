"""Jobs that take no room in the engine: their places, and a claimer that is full otherwise."""

from __future__ import annotations

import asyncio
import contextlib

from inferq.protocol.keys import Lane, QueueKeys, new_job_id
from inferq.protocol.messages import Job, Task, TextPrompt
from inferq.protocol.params import SamplingParams
from inferq.protocol.replies import ClaimedJob
from inferq.protocol.scripts import QueueScripts
from inferq.worker.queue.claimer import Claimer, ClaimLimits
from inferq.worker.queue.running import MAX_ERRANDS, RunningJob, RunningJobs

LIMITS = ClaimLimits(
    max_model_len=1000,
    block_size=16,
    lease_ms=5000,
    max_crashes=3,
    retention_ms=60_000,
    starve_ms=2000,
)


def running(job_id: str, *, errand: bool = False, alone: bool = False) -> RunningJob:
    return RunningJob(
        id=job_id,
        epoch=1,
        lane=Lane.NORMAL,
        attempts=1,
        queued_ms=0,
        reserved=0 if errand else 16,
        claimed_at=0.0,
        lease_until=1e9,
        is_errand=errand,
        runs_alone=alone,
    )


def test_errands_and_other_jobs_have_places_of_their_own() -> None:
    jobs = RunningJobs(160, 16, max_jobs=2)
    jobs.add(running("a"))
    for i in range(3):
        jobs.add(running(f"errand-{i}", errand=True))
    assert (jobs.free_places, jobs.free_errands) == (1, MAX_ERRANDS - 3)
    jobs.add(running("b"))
    assert (jobs.free_places, jobs.free_errands) == (0, MAX_ERRANDS - 3)
    errand = jobs.get("errand-0")
    assert errand is not None
    jobs.remove(errand)
    assert (jobs.free_places, jobs.free_errands) == (0, MAX_ERRANDS - 2)


def test_what_turns_out_to_be_no_errand_takes_a_place() -> None:
    jobs = RunningJobs(160, 16, max_jobs=1)
    job = running("a", errand=True)
    jobs.add(job)
    job.is_errand = False
    assert (jobs.free_places, jobs.free_errands) == (0, MAX_ERRANDS)
    jobs.add(running("b"))
    assert jobs.free_places == 0


def test_a_job_that_runs_alone_leaves_no_places() -> None:
    jobs = RunningJobs(160, 16, max_jobs=5)
    jobs.add(running("a", alone=True))
    assert (jobs.free_places, jobs.free_errands) == (0, 0)


async def test_a_full_worker_claims_an_errand_soon_after_it_arrived(
    valkey_client, queue: str
) -> None:
    keys = QueueKeys(queue)
    scripts = QueueScripts(valkey_client, keys)
    jobs = RunningJobs(16, 16, max_jobs=1)
    jobs.add(running("a"))
    assert jobs.free_tokens == 0
    taken: asyncio.Queue[ClaimedJob] = asyncio.Queue()
    claimer = Claimer(
        valkey_client,
        scripts,
        keys,
        "w1",
        jobs,
        LIMITS,
        on_claimed=lambda claimed, _: taken.put_nowait(claimed),
    )

    async def submit(task: Task, cost: int) -> str:
        job = Job(new_job_id(), TextPrompt("x"), SamplingParams(), task=task)
        await scripts.enqueue(
            job,
            lane=Lane.HIGH if task is Task.TOKENIZE else Lane.NORMAL,
            prompt_tokens=cost,
            budget=cost,
            queue_limit=10,
            retention_ms=60_000,
        )
        return job.id

    await submit(Task.GENERATE, 1)
    claiming = asyncio.create_task(claimer.run())
    try:
        await asyncio.sleep(0.1)
        errand = await submit(Task.TOKENIZE, 0)
        async with asyncio.timeout(20):
            claimed = await taken.get()
        assert (claimed.job_id, claimed.space) == (errand, 0)
        assert taken.empty()
        assert (await scripts.load()).queued == 1
    finally:
        claimer.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await claiming
