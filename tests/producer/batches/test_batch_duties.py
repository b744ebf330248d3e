"""Batches as `inferq tasks` runs them, with the least rights, on S3, and across restarts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from inferq.embedded import EmbeddedServer
from inferq.producer.batches.expiry import SERVER_FILE
from inferq.producer.batches.records import BatchRecord, Status
from inferq.producer.batches.storage import FileStorage
from inferq.producer.batches.store import BatchStore
from inferq.producer.tasks import batches
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.acl import Role, acl_rules
from inferq.protocol.keys import BatchKeys, Lane, QueueKeys, TaskKeys

#: Generous: the machine may be busy.
TIMEOUT_S = 120


@pytest.fixture
def valkey_url(own_server: EmbeddedServer) -> str:
    """A server that is this test's alone."""
    return own_server.url


@pytest.fixture
async def admin(valkey_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(valkey_url) as client:
        yield client


async def until(condition: Callable[[], Awaitable[Any]]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not await condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.05)


def has_ended(store: BatchStore, batch: BatchRecord) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        found = await store.batch(batch.id)
        return found is not None and found.status.is_final

    return look


@pytest.fixture
async def start_tasks(
    valkey_url: str, queue: str, storage_url: str
) -> AsyncIterator[Callable[..., Awaitable[asyncio.subprocess.Process]]]:
    """Starts tasks processes; what is left of them is killed."""
    started: list[asyncio.subprocess.Process] = []

    async def start(*flags: str, **environment: str) -> asyncio.subprocess.Process:
        given = {
            "INFERQ_REDIS_URL": valkey_url,
            "INFERQ_BATCH_STORAGE": storage_url,
            "INFERQ_TASKS_QUEUES": queue,
            "INFERQ_TASKS_WORKERS": "1",
            "INFERQ_TASKS_POLL_INTERVAL_S": "0.1",
            **environment,
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "inferq", "tasks", *flags),
            env={**os.environ, **given},
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("own_server", ["valkey", "redis"], indirect=True)
async def test_a_batch_is_run_with_the_least_rights_of_tasks(
    make_batch: Any, line_of: Any, start_stand_in: Any, start_tasks: Any, store: BatchStore,
    admin: Redis, queue: str, valkey_url: str, read_lines: Any, storage: FileStorage,
) -> None:  # fmt: skip
    start_stand_in().say("Hello there")
    rules = acl_rules(Role.TASKS, queue).split()
    await admin.execute_command("ACL", "SETUSER", "tasks", "on", ">secret", *rules)  # type: ignore[no-untyped-call]
    batch = await make_batch([line_of("a"), line_of("b"), b"{bad"])
    before = {key async for key in admin.scan_iter()}
    url = valkey_url.replace("redis://", "redis://tasks:secret@")
    tasks = await start_tasks("--burst", INFERQ_REDIS_URL=url)
    assert await asyncio.wait_for(tasks.wait(), TIMEOUT_S) == 0
    done = await store.batch(batch.id)
    assert done is not None
    assert (done.status, done.counts.completed, done.counts.failed) == (Status.COMPLETED, 2, 1)
    assert len(await read_lines(done.output_file_id)) == 2
    denied = {e["object"] for e in await admin.acl_log() if e["username"] == "tasks"}
    assert denied <= {"client|setinfo"}  # redis-py tells its name where it may
    ours = (
        BatchKeys.PREFIX.encode(),
        TaskKeys.PREFIX.encode(),
        QueueKeys(queue).prefix.encode(),
    )
    assert [k async for k in admin.scan_iter() if k not in before and not k.startswith(ours)] == []
    assert {each.name for each in await storage.listing()} == {
        *(batch.input_file_id, done.output_file_id, done.error_file_id),
        SERVER_FILE,
    }


async def test_a_process_that_is_told_to_end_hands_its_batch_on_at_once(
    make_batch: Any, line_of: Any, start_stand_in: Any, start_tasks: Any, store: BatchStore,
    admin: Redis, queue: str, run_turn: Any,
) -> None:  # fmt: skip
    batch = await make_batch([line_of(name) for name in "abc"])
    lane = QueueKeys(queue).jobs(Lane.LOW)

    async def are_queued() -> bool:
        return int(await admin.xlen(lane)) == 3

    first = await start_tasks(INFERQ_TASKS_BATCH_LEASE_S="600")
    await until(are_queued)
    first.terminate()
    assert await asyncio.wait_for(first.wait(), TIMEOUT_S) == 0
    due_at_ms = await admin.zscore(BatchKeys().due(queue), batch.id)
    assert due_at_ms is not None
    seconds, _ = await admin.time()
    assert due_at_ms <= (seconds + 1) * 1000
    start_stand_in().say("Hello there")
    await run_turn()
    done = await store.batch(batch.id)
    assert done is not None
    assert (done.status, done.counts.completed) == (Status.COMPLETED, 3)


async def test_a_batch_rides_out_a_server_that_restarts(
    make_batch: Any, line_of: Any, start_stand_in: Any, run_turn: Any, store: BatchStore,
    own_server: EmbeddedServer, read_lines: Any,
) -> None:  # fmt: skip
    worker = start_stand_in(step_s=0.02)
    worker.say("Hello there")
    ids = [f"line-{k}" for k in range(60)]
    batch = await make_batch([line_of(each) for each in ids])
    turn = asyncio.create_task(run_turn(window=8))

    async def is_under_way() -> bool:
        return len(worker.engine.requests) >= 10

    await until(is_under_way)
    await asyncio.to_thread(own_server.kill)
    await asyncio.to_thread(own_server.restart)
    await turn
    while not await has_ended(store, batch)():
        await run_turn(window=8)
        await asyncio.sleep(0.1)
    done = await store.batch(batch.id)
    assert done is not None
    assert done.status is Status.COMPLETED
    output = await read_lines(done.output_file_id)
    assert sorted(each["custom_id"] for each in output) == sorted(ids)


async def test_files_of_a_batch_may_lie_in_s3(
    make_batch: Any, line_of: Any, start_stand_in: Any, run_turn: Any, store: BatchStore,
    s3_storage: FileStorage, read_lines: Any,
) -> None:  # fmt: skip
    start_stand_in().say("Hello there")
    batch = await make_batch([line_of("a"), b"{bad"], storage=s3_storage)
    await run_turn(storage=s3_storage)
    done = await store.batch(batch.id)
    assert done is not None
    assert done.status is Status.COMPLETED
    [output] = await read_lines(done.output_file_id, s3_storage)
    assert output["custom_id"] == "a"
    [error] = await read_lines(done.error_file_id, s3_storage)
    assert error["error"]["code"] == "invalid_json_line"
    assert {each.name for each in await s3_storage.listing()} == {
        batch.input_file_id,
        done.output_file_id,
        done.error_file_id,
    }


async def test_a_turn_makes_way_for_tasks_of_every_queue_of_its_process(
    make_batch: Any, line_of: Any, store: BatchStore, admin: Redis, queue: str, valkey_url: str,
    storage_url: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(batches, "SHORTEST_TURN_S", 0)
    monkeypatch.setattr(batches, "LONGEST_TURN_S", 10**6)
    batch = await make_batch([line_of("a")])
    other = f"{queue}-2"
    settings = TasksSettings(
        redis_url=valkey_url,  # type: ignore[arg-type]
        queues=(queue, other),
        batch_storage=storage_url,
    )
    turn = asyncio.create_task(
        batches.run_batches(settings, queue, lambda: False, lambda completed, failed: None)
    )

    async def is_taken() -> bool:
        return await admin.hget(BatchKeys().batch(batch.id), "token") != b"0"

    await until(is_taken)
    await admin.rpush(TaskKeys(other).waiting, "a task")
    await asyncio.wait_for(turn, TIMEOUT_S)
    found = await store.batch(batch.id)
    assert found is not None
    assert not found.status.is_final


@pytest.mark.slow
async def test_two_processes_never_run_one_batch_at_once(
    make_batch: Any, line_of: Any, start_stand_in: Any, start_tasks: Any, store: BatchStore,
    read_lines: Any,
) -> None:  # fmt: skip
    worker = start_stand_in(step_s=0.01)
    worker.say("Hello there")
    ids = [f"line-{k}" for k in range(200)]
    made = [await make_batch([line_of(each) for each in ids]) for _ in range(3)]
    for _ in "ab":
        await start_tasks(INFERQ_TASKS_BATCH_WINDOW="16")
    for batch in made:
        await until(has_ended(store, batch))
        done = await store.batch(batch.id)
        assert done is not None
        assert done.status is Status.COMPLETED
        output = await read_lines(done.output_file_id)
        assert sorted(each["custom_id"] for each in output) == sorted(ids)
    assert len(worker.engine.requests) == 600


async def test_a_server_without_memory_is_waited_for(
    make_batch: Any, line_of: Any, start_stand_in: Any, run_turn: Any, store: BatchStore,
    admin: Redis,
) -> None:  # fmt: skip
    start_stand_in().say("Hello there")
    batch = await make_batch([line_of("a"), line_of("b")])
    used = int((await admin.info("memory"))["used_memory"])
    await admin.config_set("maxmemory", str(used // 2))
    await run_turn()
    found = await store.batch(batch.id)
    assert found is not None
    assert found.status is Status.VALIDATING
    await admin.config_set("maxmemory", "0")
    await run_turn()
    done = await store.batch(batch.id)
    assert done is not None
    assert (done.status, done.counts.completed) == (Status.COMPLETED, 2)


async def test_a_server_whose_memory_is_full_for_a_while_costs_no_line(
    make_batch: Any, line_of: Any, start_stand_in: Any, run_turn: Any, store: BatchStore,
    admin: Redis, read_lines: Any,
) -> None:  # fmt: skip
    worker = start_stand_in(step_s=0.02)
    worker.say("Hello there")
    ids = [f"line-{k}" for k in range(40)]
    batch = await make_batch([line_of(each) for each in ids])
    running = asyncio.create_task(run_turn(window=4, lease_s=1))

    async def has_begun() -> bool:
        return len(worker.engine.requests) >= 6

    await until(has_begun)
    used = int((await admin.info("memory"))["used_memory"])
    await admin.config_set("maxmemory", str(used // 2))
    await asyncio.sleep(1)  # some signs of life and submissions are refused
    await admin.config_set("maxmemory", "0")
    await running
    while not await has_ended(store, batch)():
        await admin.zadd(BatchKeys().due(batch.terms.queues[0]), {batch.id: 1}, xx=True)
        await run_turn(window=4)
    done = await store.batch(batch.id)
    assert done is not None
    output = await read_lines(done.output_file_id)
    assert sorted(each["custom_id"] for each in output) == sorted(ids)
