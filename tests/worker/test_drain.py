"""How a worker drains, and what ends it while it does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import redis.asyncio
from hand_worker import TIMEOUT_S, HandWorker

from inferq import AsyncClient, SamplingParams
from inferq.protocol.errors import ServerLost
from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import FinishReason
from inferq.worker import service
from inferq.worker.jobs import dispatch

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(seed=0, ignore_eos=True, max_tokens=4)

Start = Callable[..., Any]


@pytest.fixture
async def start(valkey_url: str, queue: str) -> AsyncIterator[Start]:
    """Starts workers, whose sessions `change` may alter before; they end with the test."""
    async with AsyncExitStack() as stack:

        async def start(
            change: Callable[[HandWorker], None] | None = None, **settings: Any
        ) -> HandWorker:
            worker = HandWorker(valkey_url, queue, drain_timeout_s=3600, **settings)
            await worker.load()
            if change is not None:
                change(worker)
            return await stack.enter_async_context(worker)

        yield start


@pytest.fixture
async def client(valkey_url: str, queue: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url, queue) as made:
        yield made


async def begun(worker: HandWorker, client: AsyncClient) -> Any:
    """Submit a job of which the worker has published a token."""
    job = await client.submit(PROMPT, PARAMS)
    worker.engine.bring(await worker.engine.wait_for(job.id), 65)
    await anext(aiter(job.stream(timeout_s=TIMEOUT_S)))
    return job


async def drain(worker: HandWorker, client: AsyncClient) -> None:
    """Have the worker drain, until it has handed back what has not started."""
    unstarted = await client.submit(PROMPT, PARAMS)
    await worker.engine.wait_for(unstarted.id)
    worker.stop.set()
    await until_released(unstarted)


async def until_released(job: Any) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while (await job.status()).state != "released":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_engine_that_dies_in_a_drain_ends_it_and_others_go_on_at_once(
    start: Start, client: AsyncClient, valkey_client: redis.asyncio.Redis, queue: str
) -> None:
    worker = await start()
    job = await begun(worker, client)
    await drain(worker, client)
    worker.engine.die()
    assert await worker.ended() == 1
    other = await start(worker_name="other")
    name = await other.engine.wait_for(job.id, epoch=2)  # which waits no lease
    assert (await job.status()).crashes == 1
    other.engine.bring(name, 66, 67, 68, end=FinishReason.LENGTH)
    assert (await job.result(timeout_s=TIMEOUT_S)).usage.completion_tokens == 4
    assert await valkey_client.hkeys(QueueKeys(queue).workers) == [b"other"]


@pytest.mark.parametrize("part", ["_publisher", "_leases", "_reporter", "_snapshots"])
async def test_a_part_that_fails_in_a_drain_ends_it_and_jobs_are_handed_over(
    start: Start, client: AsyncClient, part: str
) -> None:
    fails = asyncio.Event()

    def change(worker: HandWorker) -> None:
        changed = getattr(worker.session, part)
        run = changed.run

        async def run_until_it_fails(*arguments: Any) -> None:
            running = asyncio.create_task(run(*arguments))
            await fails.wait()
            running.cancel()
            raise RuntimeError("broken")

        changed.run = run_until_it_fails

    worker = await start(change)
    job = await begun(worker, client)
    await drain(worker, client)
    fails.set()
    assert await worker.ended() == 1
    status = await job.status()
    assert (status.state, status.crashes, status.handoffs) == ("released", 0, 1)


async def test_what_could_not_be_handed_back_is_tried_again_while_others_finish(
    start: Start, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HAND_BACK_AGAIN_S", 0.0)
    worker = await start()
    release, faults = worker.scripts.release, [ServerLost("away")] * 3

    async def faulty(*arguments: Any) -> int:
        if faults:
            raise faults.pop()
        return await release(*arguments)

    monkeypatch.setattr(worker.scripts, "release", faulty)
    long = await begun(worker, client)
    await drain(worker, client)
    assert not faults
    assert (await long.status()).state == "running"
    worker.engine.bring(f"{long.id}:1", 66, 67, 68, end=FinishReason.LENGTH)
    assert await worker.ended() == 0
    assert (await long.result(timeout_s=TIMEOUT_S)).usage.completion_tokens == 4


@pytest.mark.parametrize("engine_dies", [False, True])
async def test_a_report_that_is_under_way_does_not_bring_a_worker_back_that_signed_off(
    start: Start, valkey_client: redis.asyncio.Redis, queue: str, engine_dies: bool
) -> None:
    worker = await start(report_interval_s=60)
    keys = QueueKeys(queue)
    register, unregister = worker.scripts.register, worker.scripts.unregister
    under_way, signed_off = asyncio.Event(), asyncio.Event()
    calls: list[asyncio.Task[Any]] = []

    async def arrive_late(*arguments: Any) -> Any:
        under_way.set()
        with suppress(TimeoutError):  # by which only a worker that waits for its report ends this
            await asyncio.wait_for(signed_off.wait(), 0.5)
        return await register(*arguments)

    async def send_report(*arguments: Any) -> Any:
        calls.append(asyncio.create_task(arrive_late(*arguments)))  # not cut off with its sender
        return await asyncio.shield(calls[-1])

    async def sign_off(name: str) -> None:
        await unregister(name)
        signed_off.set()

    async with asyncio.timeout(TIMEOUT_S):
        while not await valkey_client.hexists(keys.workers, worker.name):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    worker.scripts.register, worker.scripts.unregister = send_report, sign_off
    if engine_dies:
        worker.stop.set()
        await asyncio.wait_for(under_way.wait(), TIMEOUT_S)
        worker.engine.die()
    worker.stop.set()
    await worker.ended()
    await asyncio.gather(*calls)
    assert not await valkey_client.hexists(keys.workers, worker.name)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Has two prompts at most be tokenized at once, which takes until this is set."""
    monkeypatch.setattr(dispatch, "MAX_TOKENIZING", 2)
    goes_on = threading.Event()
    yield goes_on
    goes_on.set()


def blocking(goes_on: threading.Event) -> Callable[[HandWorker], None]:
    def change(worker: HandWorker) -> None:
        encode = worker.tokenizer.encode

        def wait_and_encode(text: str, **options: Any) -> list[int]:
            goes_on.wait()
            return encode(text, **options)

        worker.tokenizer.encode = wait_and_encode  # type: ignore[method-assign]

    return change


async def claimed(worker: HandWorker, client: AsyncClient, count: int) -> list[Any]:
    jobs = [await client.submit(f"prompt {i}", PARAMS) for i in range(count)]
    async with asyncio.timeout(TIMEOUT_S):
        while len(worker.session.jobs) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return jobs


@pytest.mark.parametrize("engine_dies", [False, True])
async def test_a_worker_that_ends_waits_for_no_prompt_that_is_tokenized(
    start: Start, client: AsyncClient, blocked: threading.Event, engine_dies: bool
) -> None:
    worker = await start(blocking(blocked))
    jobs = await claimed(worker, client, 4)
    if engine_dies:
        worker.engine.die()
    else:
        worker.stop.set()
    assert await worker.ended() == int(engine_dies)
    assert not _preparing()
    for job in jobs:
        assert (await job.status()).owner is None
    blocked.set()
    assert not worker.engine.requests


async def test_a_job_that_is_cancelled_is_not_tokenized_any_more(
    start: Start, client: AsyncClient, blocked: threading.Event
) -> None:
    worker = await start(blocking(blocked), lease_s=4)  # whose heartbeats tell of the cancel
    jobs = await claimed(worker, client, 3)
    for job in jobs:
        await job.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        while len(worker.session.jobs):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not _preparing()
    assert [(await job.status()).finish_reason for job in jobs] == ["cancelled"] * 3


def _preparing() -> list[asyncio.Task[Any]]:
    """The tasks that are about to bring jobs to an engine."""
    names = ((task, getattr(task.get_coro(), "__qualname__", "")) for task in asyncio.all_tasks())
    return [task for task, name in names if name == "Dispatcher._prepare"]
