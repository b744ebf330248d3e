"""Batches that change hands: stopped, left, taken away, and never run by two at once."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from inferq.producer import AsyncClient
from inferq.producer.batches import answering, turns
from inferq.producer.batches.records import BatchRecord, Status
from inferq.producer.batches.storage import FileStorage
from inferq.producer.batches.store import BatchLost, BatchStore, TakenBatch
from inferq.protocol.keys import BatchKeys, Lane, QueueKeys

#: Generous: the machine may be busy.
TIMEOUT_S = 90


async def until(condition: Callable[[], Awaitable[Any]]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not await condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)


@pytest.fixture
def check_ended(store: BatchStore, read_lines: Any) -> Callable[..., Awaitable[BatchRecord]]:
    """Assert that each line ended once in a batch that was completed."""

    async def check(batch: BatchRecord, ids: list[str]) -> BatchRecord:
        done = await store.batch(batch.id)
        assert done is not None
        assert done.status is Status.COMPLETED
        output = await read_lines(done.output_file_id)
        errors = await read_lines(done.error_file_id)
        assert sorted(each["custom_id"] for each in [*output, *errors]) == sorted(ids)
        assert (done.counts.completed, done.counts.failed) == (len(output), len(errors))
        return done

    return check


@pytest.fixture
def make_due(valkey_client: Redis, queue: str) -> Callable[[BatchRecord], Awaitable[None]]:
    """Let the lease of a batch end now, without the test waiting for it."""

    async def end(batch: BatchRecord) -> None:
        await valkey_client.zadd(BatchKeys().due(queue), {batch.id: 1}, xx=True)

    return end


async def test_a_run_that_is_stopped_goes_on_elsewhere_and_asks_nothing_anew(
    make_batch: Any, run_turn: Any, line_of: Any, queue: str, start_stand_in: Any,
    check_ended: Any, valkey_client: Redis,
) -> None:  # fmt: skip
    ids = [f"line-{k}" for k in range(60)]
    batch = await make_batch([line_of(each) for each in ids])

    async def run_until(condition: Callable[[], Awaitable[Any]]) -> None:
        stop = asyncio.Event()
        turn = asyncio.create_task(run_turn(stop, window=10))
        await until(condition)
        stop.set()
        await turn

    async def are_queued() -> bool:
        return int(await valkey_client.xlen(QueueKeys(queue).jobs(Lane.LOW))) == 10

    await run_until(are_queued)
    worker = start_stand_in()
    worker.say("Hello there")

    async def are_answered() -> bool:
        return len(worker.engine.requests) >= 25

    await run_until(are_answered)
    await run_turn()
    await check_ended(batch, ids)
    assert len(worker.engine.requests) == 60


async def test_a_batch_that_is_taken_away_again_and_again_has_each_line_once(
    make_batch: Any, run_turn: Any, line_of: Any, start_stand_in: Any, check_ended: Any,
    make_due: Any, store: BatchStore, valkey_client: Redis,
) -> None:  # fmt: skip
    start_stand_in(step_s=0.02).say("Hello there, you")
    ids = [f"line-{k}" for k in range(40)]
    batch = await make_batch([line_of(each) for each in ids])

    async def has_ended() -> bool:
        found = await store.batch(batch.id)
        return found is not None and found.status.is_final

    async def until_token(least: int) -> None:
        key = BatchKeys().batch(batch.id)

        async def is_taken() -> bool:
            return int(await valkey_client.hget(key, "token") or 0) >= least or await has_ended()

        await until(is_taken)

    async def keep_running() -> None:
        while not await has_ended():
            await run_turn(window=8, lease_s=4)
            await asyncio.sleep(0.02)

    runs = [asyncio.create_task(keep_running()) for _ in range(2)]
    for taken_away in range(4):
        await until_token(taken_away + 1)
        await make_due(batch)
    for run in runs:
        await run
    await check_ended(batch, ids)


async def test_an_older_token_writes_nothing(
    make_batch: Any, store: BatchStore, line_of: Any, queue: str, make_due: Any
) -> None:
    batch = await make_batch([line_of("a")])
    assert await store.take("another-queue", most=9, lease_ms=60_000) == []
    [old] = await store.take(queue, most=9, lease_ms=60_000)
    assert await store.take(queue, most=9, lease_ms=60_000) == []
    await make_due(batch)
    [new] = await store.take(queue, most=9, lease_ms=60_000)
    assert new.token > old.token
    expires_at = int(time.time()) + 60
    with pytest.raises(BatchLost):
        await store.write(old, {"model": "x"}, lease_ms=1, part=(0, "old"))
    with pytest.raises(BatchLost):
        await store.finish(old, Status.COMPLETED, record_expires_at=expires_at)
    found = await store.batch(batch.id)
    assert found is not None
    assert (found.model, found.status) == (None, Status.VALIDATING)
    assert (await store.resumption(batch.id)).parts == []
    await store.finish(new, Status.FAILED, record_expires_at=expires_at)
    await store.finish(new, Status.FAILED, record_expires_at=expires_at)  # its reply was lost
    with pytest.raises(BatchLost):
        await store.write(new, {}, lease_ms=1)


async def test_a_part_is_kept_once_however_often_it_is_written(
    make_batch: Any, store: BatchStore, line_of: Any, queue: str
) -> None:
    batch = await make_batch([line_of("a")])
    [taken] = await store.take(queue, most=9, lease_ms=60_000)
    for number, part in ((0, "first"), (0, "first"), (1, "second"), (1, "second")):
        await store.write(taken, {}, lease_ms=60_000, part=(number, part))
    assert (await store.resumption(batch.id)).parts == [b"first", b"second"]


async def test_a_storage_that_is_full_for_a_while_costs_no_line(
    make_batch: Any, run_turn: Any, line_of: Any, start_stand_in: Any, check_ended: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    start_stand_in().say("Hello there")
    ids = [f"line-{k}" for k in range(20)]
    batch = await make_batch([line_of(each) for each in ids])
    failures = iter(range(3))
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if next(failures, None) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    await run_turn()
    await check_ended(batch, ids)
    assert next(failures, None) is None


async def test_a_storage_that_is_away_is_waited_for(
    make_batch: Any, run_turn: Any, line_of: Any, start_stand_in: Any, check_ended: Any,
    storage_url: str, store: BatchStore, make_due: Any,
) -> None:  # fmt: skip
    start_stand_in().say("Hello there")
    batch = await make_batch([line_of("a")])
    await asyncio.to_thread(Path(storage_url).rename, f"{storage_url}-away")
    await run_turn()
    found = await store.batch(batch.id)
    assert found is not None
    assert found.status is Status.VALIDATING
    await asyncio.to_thread(Path(f"{storage_url}-away").rename, storage_url)
    await make_due(batch)
    await run_turn()
    await check_ended(batch, ["a"])


async def test_an_input_that_is_removed_underneath_ends_the_batch_with_what_it_has(
    make_batch: Any, run_turn: Any, line_of: Any, start_stand_in: Any, storage: FileStorage,
    store: BatchStore, read_lines: Any,
) -> None:  # fmt: skip
    worker = start_stand_in()
    batch = await make_batch([line_of(f"line-{k}") for k in range(30)])
    worker.say("Hello there")
    stop = asyncio.Event()
    turn = asyncio.create_task(run_turn(stop, window=4))

    async def are_some_answered() -> bool:
        return len(worker.engine.requests) >= 8

    await until(are_some_answered)
    stop.set()
    await turn
    await storage.delete(batch.input_file_id)
    await run_turn()
    done = await store.batch(batch.id)
    assert done is not None
    assert (done.status, done.errors[0].code) == (Status.FAILED, "input_file_gone")
    output = await read_lines(done.output_file_id)
    assert 0 < len({each["custom_id"] for each in output}) == len(output) == done.counts.completed


async def test_results_that_the_server_lost_are_made_again(
    make_batch: Any, run_turn: Any, line_of: Any, start_stand_in: Any, check_ended: Any,
    valkey_client: Redis, queue: str, client: AsyncClient,
) -> None:  # fmt: skip
    ids = [f"line-{k}" for k in range(6)]
    batch = await make_batch([line_of(each) for each in ids])
    keys = QueueKeys(queue)
    stop = asyncio.Event()
    turn = asyncio.create_task(run_turn(stop))

    async def are_queued() -> bool:
        return int(await valkey_client.xlen(keys.jobs(Lane.LOW))) == 6

    await until(are_queued)
    stop.set()
    await turn
    worker = start_stand_in()
    worker.say("Hello there")

    async def are_done() -> bool:
        return (await client.queue_length()).finished_total == 6

    await until(are_done)
    lost = [key async for key in valkey_client.scan_iter(f"{keys.prefix}out:*")]
    lost += [key async for key in valkey_client.scan_iter(f"{keys.prefix}job:*")]
    await valkey_client.delete(*lost[::2], *lost[1::2])
    await run_turn()
    await check_ended(batch, ids)
    assert len(worker.engine.requests) == 12


async def test_a_batch_waits_for_a_queue_that_serves_its_model(
    make_batch: Any, run_turn: Any, line_of: Any, start_stand_in: Any, check_ended: Any,
    store: BatchStore, queue: str, make_due: Any,
) -> None:  # fmt: skip
    start_stand_in(model="other").say("no")
    batch = await make_batch([line_of("a")], terms={"queues": (queue, f"{queue}-2")})
    await run_turn()
    found = await store.batch(batch.id)
    assert found is not None
    assert found.status is Status.IN_PROGRESS
    start_stand_in(queue=f"{queue}-2").say("Hello there")
    await make_due(batch)
    await run_turn()
    await check_ended(batch, ["a"])


async def test_a_taken_batch_tells_its_record(
    make_batch: Any, store: BatchStore, line_of: Any, queue: str
) -> None:
    batch = await make_batch([line_of("a")], owner="alice", metadata={"k": "v"})
    [taken] = await store.take(queue, most=1, lease_ms=60_000)
    assert taken == TakenBatch(batch, 1)


async def test_a_worker_may_be_absent_for_longer_than_any_wait(
    make_batch: Any, run_turn: Any, line_of: Any, start_stand_in: Any, check_ended: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    waits = 0
    collect = answering.collect_answers

    async def collect_briefly(jobs: Any, *, timeout_s: float, **options: Any) -> Any:
        nonlocal waits
        waits += 1
        return await collect(jobs, timeout_s=min(timeout_s, 0.1), **options)

    monkeypatch.setattr(answering, "collect_answers", collect_briefly)
    batch = await make_batch([line_of("a")])
    turn = asyncio.create_task(run_turn())

    async def has_waited() -> bool:
        return waits > 3

    await until(has_waited)
    start_stand_in().say("Hello there")
    monkeypatch.undo()
    await turn
    await check_ended(batch, ["a"])


@pytest.fixture
def leave_queued(
    run_turn: Any, valkey_client: Redis, queue: str
) -> Callable[[int], Awaitable[None]]:
    """Run what is due until so many lines wait in the queue, then stop."""

    async def run(number: int) -> None:
        stop = asyncio.Event()
        turn = asyncio.create_task(run_turn(stop))

        async def are_queued() -> bool:
            return int(await valkey_client.xlen(QueueKeys(queue).jobs(Lane.LOW))) == number

        await until(are_queued)
        stop.set()
        await turn

    return run


async def test_a_cancelled_batch_ends_the_jobs_that_an_earlier_run_left(
    make_batch: Any, run_turn: Any, line_of: Any, leave_queued: Any, store: BatchStore,
    client: AsyncClient, read_lines: Any,
) -> None:  # fmt: skip
    batch = await make_batch([line_of(f"line-{k}") for k in range(7)])
    await leave_queued(7)
    await store.request_cancel(batch.id)
    await run_turn()
    done = await store.batch(batch.id)
    assert done is not None
    assert (done.status, done.counts.failed) == (Status.CANCELLED, 7)
    length = await client.queue_length()
    assert (length.queued, length.running, length.finished_total) == (0, 0, 7)
    codes = [each["error"]["code"] for each in await read_lines(done.error_file_id)]
    assert codes == ["batch_cancelled"] * 7


async def test_answers_that_came_while_nobody_ran_a_batch_count_though_its_window_has_passed(
    make_batch: Any, run_turn: Any, line_of: Any, leave_queued: Any, store: BatchStore,
    client: AsyncClient, start_stand_in: Any, valkey_client: Redis, read_lines: Any,
) -> None:  # fmt: skip
    batch = await make_batch([line_of(f"line-{k}") for k in range(5)])
    await leave_queued(5)
    start_stand_in().say("Hello there")

    async def are_done() -> bool:
        return (await client.queue_length()).finished_total == 5

    await until(are_done)
    await valkey_client.hset(BatchKeys().batch(batch.id), "expires_at", int(time.time()) - 5)
    await run_turn()
    done = await store.batch(batch.id)
    assert done is not None
    assert (done.counts.completed, done.counts.failed) == (5, 0)
    assert len(await read_lines(done.output_file_id)) == 5


async def test_a_batch_that_is_cancelled_before_it_begins_submits_nothing(
    make_batch: Any, run_turn: Any, line_of: Any, store: BatchStore, client: AsyncClient,
    read_lines: Any,
) -> None:  # fmt: skip
    batch = await make_batch([line_of("a"), b"{bad", line_of("b")])
    await store.request_cancel(batch.id)
    await run_turn()
    done = await store.batch(batch.id)
    assert done is not None
    assert (done.status, done.counts.total, done.counts.failed) == (Status.CANCELLED, 3, 3)
    codes = sorted(each["error"]["code"] for each in await read_lines(done.error_file_id))
    assert codes == ["batch_cancelled", "batch_cancelled", "invalid_json_line"]
    assert (await client.queue_length()).finished_total == 0


async def test_a_model_that_living_workers_do_not_serve_is_given_up_after_a_while(
    make_batch: Any, run_turn: Any, line_of: Any, start_stand_in: Any, store: BatchStore,
    queue: str, make_due: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in (queue, f"{queue}-2"):
        start_stand_in(queue=name, model="other")
    batch = await make_batch([line_of("a")], terms={"queues": (queue, f"{queue}-2")})
    await run_turn()
    found = await store.batch(batch.id)
    assert found is not None
    assert found.status is Status.IN_PROGRESS
    monkeypatch.setattr(turns, "PATIENCE_S", -1)
    await make_due(batch)
    await run_turn()
    found = await store.batch(batch.id)
    assert found is not None
    assert (found.status, found.errors[0].code) == (Status.FAILED, "model_not_found")


async def test_a_model_goes_to_the_queue_that_the_gateway_names(
    make_batch: Any, run_turn: Any, line_of: Any, start_stand_in: Any, check_ended: Any,
    queue: str, client: AsyncClient,
) -> None:  # fmt: skip
    first = start_stand_in()
    second = start_stand_in(queue=f"{queue}-2")
    second.say("Hello there")
    terms = {"queues": (queue, f"{queue}-2"), "models": {"stand-in": f"{queue}-2"}}
    batch = await make_batch([line_of("a")], terms=terms)
    await run_turn()
    await check_ended(batch, ["a"])
    assert (len(first.engine.requests), len(second.engine.requests)) == (0, 1)


async def test_a_fault_while_batches_are_taken_lets_go_of_those_that_run(
    make_batch: Any, run_turn: Any, line_of: Any, start_stand_in: Any, store: BatchStore,
    valkey_client: Redis, queue: str, check_ended: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    batch = await make_batch([line_of("a")])
    take, takes = store.take, 0

    async def fail_later(*arguments: Any, **options: Any) -> list[TakenBatch]:
        nonlocal takes
        takes += 1
        if takes > 1:
            raise RuntimeError("a fault")
        return await take(*arguments, **options)

    monkeypatch.setattr(store, "take", fail_later)
    with pytest.raises(RuntimeError, match="a fault"):
        await run_turn(lease_s=600)
    monkeypatch.undo()
    start_stand_in().say("Hello there")
    await run_turn()
    await check_ended(batch, ["a"])


async def test_an_unreadable_record_beside_a_batch_costs_it_nothing(
    make_batch: Any, run_turn: Any, line_of: Any, start_stand_in: Any, valkey_client: Redis,
    check_ended: Any,
) -> None:  # fmt: skip
    start_stand_in().say("Hello there")
    bad = await make_batch([line_of("b")])
    batch = await make_batch([line_of("a")])
    await valkey_client.hset(BatchKeys().batch(bad.id), "counts", "[]")
    await run_turn()
    await check_ended(batch, ["a"])
