"""Lines of several jobs and with more to ask, before queues that are full and servers that fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from inferq.producer import AsyncClient
from inferq.producer.batches import answering
from inferq.producer.batches.records import BatchRecord, Status
from inferq.producer.batches.store import BatchStore
from inferq.producer.result import TokenizedPrompt
from inferq.protocol.errors import InferqError, QueueFull
from inferq.protocol.keys import BatchKeys, Lane, QueueKeys
from inferq.protocol.messages import FinishReason

URL = "/v1/completions"
#: Generous: the machine may be busy.
TIMEOUT_S = 90


@pytest.fixture
def make_completion(make_batch: Any) -> Callable[..., Awaitable[BatchRecord]]:
    """Make a batch of one line of `/v1/completions`."""

    async def make(prompt: Any, **body: Any) -> BatchRecord:
        given = {"model": "stand-in", "prompt": prompt, "max_tokens": 2, **body}
        line = {"custom_id": "a", "method": "POST", "url": URL, "body": given}
        made: BatchRecord = await make_batch([line], endpoint=URL)
        return made

    return make


async def until(look: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while await look() != wanted:
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)


async def done_of(store: BatchStore, batch: BatchRecord) -> BatchRecord:
    found = await store.batch(batch.id)
    assert found is not None
    return found


class FullQueue:
    """Stands for a queue that has no room for questions about prompts, `times` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: float) -> None:
        self.lanes: list[str] = []
        self._left = times
        self._tokenize = AsyncClient.tokenize
        full = self

        async def tokenize(client: AsyncClient, *given: Any, **options: Any) -> TokenizedPrompt:
            return await full.ask(client, *given, **options)

        monkeypatch.setattr(AsyncClient, "tokenize", tokenize)

    async def ask(self, client: AsyncClient, *given: Any, **options: Any) -> TokenizedPrompt:
        self.lanes.append(options["lane"])
        self._left -= 1
        if self._left >= 0:
            raise QueueFull("the queue is full")
        return await self._tokenize(client, *given, **options)


async def test_an_answer_waits_for_the_text_of_its_prompt_while_the_queue_is_full(
    make_completion: Any, run_turn: Any, read_lines: Any, store: BatchStore, start_stand_in: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    worker = start_stand_in()
    worker.say(" is all")
    full = FullQueue(monkeypatch, 2)
    batch = await make_completion([1, 2, 3], echo=True)
    await run_turn()
    [answer] = await read_lines((await done_of(store, batch)).output_file_id)
    assert answer["response"]["status_code"] == 200
    [choice] = answer["response"]["body"]["choices"]
    assert choice["text"] == "<|im_start|><|im_end|><repo_name> is all"
    assert full.lanes == [Lane.LOW] * 3
    assert len(worker.engine.requests) == 1


async def test_a_batch_that_is_cancelled_waits_for_no_such_text(
    make_completion: Any, run_turn: Any, read_lines: Any, store: BatchStore, start_stand_in: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    start_stand_in().say("all")
    full = FullQueue(monkeypatch, float("inf"))
    batch = await make_completion([1, 2, 3], echo=True)
    turn = asyncio.create_task(run_turn(lease_s=1))

    async def has_asked() -> bool:
        return bool(full.lanes)

    await until(has_asked, True)
    await store.request_cancel(batch.id)
    await turn
    done = await done_of(store, batch)
    assert done.status is Status.CANCELLED
    [error] = await read_lines(done.error_file_id)
    assert error["error"]["code"] == "batch_cancelled"


async def test_the_jobs_of_a_line_that_is_given_up_half_submitted_are_cancelled(
    make_completion: Any, run_turn: Any, store: BatchStore, client: AsyncClient
) -> None:
    batch = await make_completion([f"prompt {k}" for k in range(7)])
    turn = asyncio.create_task(run_turn(queue_limit=3, lease_s=1))

    async def queued() -> int:
        return (await client.queue_length()).queued

    await until(queued, 3)
    await store.request_cancel(batch.id)
    await turn
    assert (await done_of(store, batch)).status is Status.CANCELLED
    length = await client.queue_length()
    assert (length.queued, length.running, length.finished_total) == (0, 0, 3)


async def test_a_prompt_that_is_refused_leaves_none_of_its_line_behind(
    make_completion: Any, run_turn: Any, read_lines: Any, store: BatchStore, client: AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    submit = AsyncClient.submit

    async def refuse_third(self: AsyncClient, prompt: Any, *given: Any, **options: Any) -> Any:
        lane = "odd" if prompt == "prompt 2" else options.pop("lane")
        return await submit(self, prompt, *given, **{**options, "lane": lane})

    monkeypatch.setattr(AsyncClient, "submit", refuse_third)
    batch = await make_completion([f"prompt {k}" for k in range(4)])
    await run_turn()
    [error] = await read_lines((await done_of(store, batch)).error_file_id)
    assert error["response"]["status_code"] == 400
    length = await client.queue_length()
    assert (length.queued, length.finished_total) == (0, 2)


@pytest.mark.parametrize(
    ("owner", "name"), [(AsyncClient, "submit"), (answering, "collect_answers")]
)
async def test_a_fault_of_the_server_ends_no_line(
    make_batch: Any, line_of: Any, run_turn: Any, store: BatchStore, start_stand_in: Any,
    valkey_client: Redis, queue: str, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str,
) -> None:  # fmt: skip
    start_stand_in().say("Hello there")
    batch = await make_batch([line_of(each) for each in "abc"])

    async def fail(*_: Any, **__: Any) -> None:
        raise InferqError("the Redis server answered: Error running script")

    with monkeypatch.context() as broken:
        broken.setattr(owner, name, fail)
        await run_turn()
    found = await done_of(store, batch)
    assert (found.status, found.counts.failed) == (Status.IN_PROGRESS, 0)
    await valkey_client.zadd(BatchKeys().due(queue), {batch.id: 1}, xx=True)
    await run_turn()
    done = await done_of(store, batch)
    assert (done.status, done.counts.completed) == (Status.COMPLETED, 3)


async def test_jobs_beside_one_that_failed_end_in_order_although_the_line_has_ended(
    make_completion: Any, run_turn: Any, store: BatchStore, client: AsyncClient, worker: Any,
    ending: Any, queue: str, valkey_client: Redis,
) -> None:  # fmt: skip
    batch = await make_completion(["One", "Two"])
    turn = asyncio.create_task(run_turn())
    first, second = await worker.wait_for_jobs(2)
    await client.cancel(first.job_id)
    reply = await worker.publish(
        first, 0, ending(0, FinishReason.CANCELLED), terminal=FinishReason.CANCELLED
    )
    assert reply.status == "ok"
    await turn
    done = await done_of(store, batch)
    assert (done.status, done.counts.failed) == (Status.COMPLETED, 1)
    reply = await worker.publish(
        second, 0, ending(0, FinishReason.CANCELLED), terminal=FinishReason.CANCELLED
    )
    assert (reply.status, reply.cancel) == ("ok", True)
    length = await client.queue_length()
    assert (length.running, length.finished_total) == (0, 2)
    load = QueueKeys(queue).load
    assert await valkey_client.hmget(load, "prompt_tokens", "budget_tokens") == [b"0", b"0"]


async def test_jobs_beside_one_whose_result_is_lost_are_cancelled_and_asked_anew(
    make_completion: Any, run_turn: Any, store: BatchStore, client: AsyncClient, worker: Any,
    queue: str, valkey_client: Redis, start_stand_in: Any,
) -> None:  # fmt: skip
    batch = await make_completion(["One", "Two"])
    stop = asyncio.Event()
    turn = asyncio.create_task(run_turn(stop))
    lost, other = await worker.wait_for_jobs(2)
    stop.set()
    await turn
    await worker.serve(lost, 2)
    keys = QueueKeys(queue)
    await valkey_client.delete(keys.job(lost.job_id), keys.out(lost.job_id))
    start_stand_in().say("Hello there")
    await run_turn()
    assert await valkey_client.hget(keys.job(other.job_id), "cancel") == b"1"
    assert (await done_of(store, batch)).counts.completed == 1
