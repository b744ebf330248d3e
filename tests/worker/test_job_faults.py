"""What becomes of a job when the worker itself is at fault, and of those beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hand_worker import TIMEOUT_S, HandWorker

from inferq import AsyncClient, ErrorCode, JobFailed, SamplingParams
from inferq.protocol.keys import Lane, QueueKeys, new_job_id
from inferq.protocol.messages import FinishReason
from inferq.protocol.scripts import QueueScripts
from inferq.worker.jobs.generation import Generation

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(seed=0, ignore_eos=True, max_tokens=2)


class PanicException(BaseException):
    """As pyo3's, which Rust's panics become: no `Exception`."""


@pytest.fixture
async def worker(valkey_url: str, queue: str) -> AsyncIterator[HandWorker]:
    async with HandWorker(valkey_url, queue) as running:
        yield running


@pytest.fixture
async def client(valkey_url: str, queue: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url, queue) as made:
        yield made


async def fails(job: Any) -> str:
    """Wait until a job fails for a fault of the worker's; return what is said of it."""
    with pytest.raises(JobFailed) as caught:
        await job.result(timeout_s=TIMEOUT_S)
    assert caught.value.info.code == ErrorCode.INTERNAL
    return caught.value.info.message


async def is_served(worker: HandWorker, client: AsyncClient) -> None:
    """Have another job end as it should, and nothing of any be left."""
    job = await client.submit(PROMPT, PARAMS)
    worker.engine.bring(await worker.engine.wait_for(job.id), 65, 66, end=FinishReason.LENGTH)
    assert (await job.result(timeout_s=TIMEOUT_S)).token_ids == (65, 66)
    async with asyncio.timeout(TIMEOUT_S):
        while len(worker.session.jobs):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not worker.engine.requests
    assert not worker.code.done()


@pytest.mark.parametrize("fault", [PanicException, SystemExit, StopIteration])
async def test_a_prompt_that_breaks_its_tokenizer_ends_its_job_alone(
    worker: HandWorker,
    client: AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    fault: type[BaseException],
) -> None:
    def encode(text: str, **_: Any) -> list[int]:
        raise fault(f"no way with {text}")

    monkeypatch.setattr(worker.tokenizer, "encode", encode)
    said = await fails(await client.submit("this", PARAMS))
    assert said.endswith(f"{fault.__name__}: no way with this")
    await is_served(worker, client)


async def test_tokens_that_break_the_detokenizer_end_their_job_alone(
    worker: HandWorker, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Generation.receive

    def panic(generation: Generation, new: Any) -> bool:
        if 99 in new.token_ids:
            raise PanicException("99")
        return receive(generation, new)

    monkeypatch.setattr(Generation, "receive", panic)
    job = await client.submit(PROMPT, PARAMS)
    worker.engine.bring(await worker.engine.wait_for(job.id), 99)
    assert await fails(job) == "PanicException: 99"
    await is_served(worker, client)


async def test_a_cancel_that_breaks_the_detokenizer_ends_its_job_alone(
    worker: HandWorker, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(generation: Generation, reason: FinishReason) -> None:
        raise PanicException(reason)

    monkeypatch.setattr(Generation, "end_early", panic)
    job = await client.submit(PROMPT, PARAMS)
    name = await worker.engine.wait_for(job.id)
    await job.cancel()
    worker.engine.bring(name, 65)  # the publish that this makes tells of the cancel
    assert await fails(job) == "PanicException: cancelled"
    await is_served(worker, client)


async def test_a_dead_letter_that_cannot_be_written_still_ends_its_job(
    worker: HandWorker, client: AsyncClient, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reject(*_: Any, **__: Any) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(worker.scripts, "reject", reject)
    junk = new_job_id()
    await QueueScripts(worker.scripts._redis, QueueKeys(queue)).enqueue_payload(
        junk,
        b"junk",
        digest="x",
        lane=Lane.NORMAL,
        prompt_tokens=1,
        budget=1,
        queue_limit=10,
        retention_ms=60_000,
    )
    assert await fails(client.job(junk)) == "RuntimeError: not today"
    await is_served(worker, client)


async def test_a_worker_that_cannot_end_a_job_hands_it_over_and_ends(
    worker: HandWorker, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any, **__: Any) -> None:
        raise RuntimeError("not even that")

    monkeypatch.setattr(worker.session._dispatcher, "_fail", cannot)
    monkeypatch.setattr(worker.tokenizer, "encode", cannot)
    job = await client.submit("this", PARAMS)
    assert await worker.ended() == 1
    status = await job.status()
    assert (status.state, status.handoffs) == ("released", 1)
