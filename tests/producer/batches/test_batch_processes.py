"""Batches with real processes: killed in the middle, and measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inferq.producer.batches.records import BatchRecord, Status
from inferq.producer.batches.store import BatchStore

HERE = Path(__file__).parent
#: Generous: the machine may be busy.
TIMEOUT_S = 240
#: What a batch may take beside what the process takes anyway.
MOST_KIB = 200 * 1024


class Killable:
    """A process and its children."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(command, env=environment, start_new_session=True)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Killable]]:
    """Starts processes; what is left of them is killed."""
    started: list[Killable] = []

    def run(*arguments: str, **environment: str) -> Killable:
        started.append(Killable([sys.executable, "-P", *arguments], {**os.environ, **environment}))
        return started[-1]

    yield run
    for each in started:
        each.kill()


@pytest.fixture
def start_tasks(start: Any, valkey_url: str, queue: str, storage_url: str) -> Callable[[], Any]:
    def run() -> Any:
        return start(
            *("-m", "inferq", "tasks"),
            INFERQ_REDIS_URL=valkey_url,
            INFERQ_BATCH_STORAGE=storage_url,
            INFERQ_TASKS_QUEUES=queue,
            INFERQ_TASKS_WORKERS="1",
            INFERQ_TASKS_POLL_INTERVAL_S="0.1",
            INFERQ_TASKS_BATCH_WINDOW="64",
            INFERQ_TASKS_BATCH_LEASE_S="3",
        )

    return run


async def until(
    store: BatchStore, batch: BatchRecord, condition: Callable[[BatchRecord], bool]
) -> BatchRecord:
    give_up = time.monotonic() + TIMEOUT_S
    while True:
        found = await store.batch(batch.id)
        assert found is not None
        if condition(found):
            return found
        assert time.monotonic() < give_up, found
        await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
async def test_killed_three_times_and_its_worker_twice_a_batch_has_each_id_once(
    make_batch: Any, store: BatchStore, line_of: Any, start: Any, start_tasks: Any,
    read_lines: Any, valkey_url: str, queue: str, smollm2: Path,
) -> None:  # fmt: skip
    ids = [f"line-{k}" for k in range(2000)]
    lines: list[Any] = [
        line_of(each, **({} if k % 20 else {"max_tokens": -1})) for k, each in enumerate(ids)
    ]
    lines[1000:1000] = [b"{bad", b"\xff"]
    batch = await make_batch(lines)

    def start_worker(name: str) -> Any:
        support = HERE.parents[1] / "support"
        program = str(support / "stand_in_process.py")
        return start(program, valkey_url, queue, str(smollm2), name, PYTHONPATH=str(support))

    worker, tasks = start_worker("worker-0"), start_tasks()
    kills = [("tasks", 250), ("worker", 500), ("tasks", 750), ("worker", 1000), ("tasks", 1250)]
    for number, (kind, completed) in enumerate(kills):
        found = await until(store, batch, lambda b, n=completed: b.counts.completed >= n)  # type: ignore[misc]
        assert found.status is Status.IN_PROGRESS
        if kind == "tasks":
            tasks.kill()
            tasks = start_tasks()
        else:
            worker.kill()
            worker = start_worker(f"worker-{number + 1}")
    done = await until(store, batch, lambda b: b.status.is_final)
    assert done.status is Status.COMPLETED
    output = await read_lines(done.output_file_id)
    errors = await read_lines(done.error_file_id)
    seen = Counter(each["custom_id"] for each in [*output, *errors])
    assert seen.pop(None) == 2
    assert seen == Counter(ids)
    assert (len(output), len(errors)) == (1900, 102)
    assert {len(each["response"]["body"]["choices"]) for each in output} == {1}
    assert (done.counts.completed, done.counts.failed) == (1900, 102)


async def run_batch(valkey_url: str, queue: str, storage_url: str) -> tuple[int, int]:
    """Run what is due in another process; return its memory before and at most, in KiB."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(HERE / "batch_process.py"), valkey_url, queue, storage_url),
        stdout=subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    before, most = map(int, printed.split()[-2:])
    return before, most


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
async def test_a_file_of_200_mb_takes_less_than_200_mb_of_memory(
    make_batch: Any, store: BatchStore, line_of: Any, valkey_url: str, queue: str,
    storage_url: str, worker: Any,
) -> None:  # fmt: skip
    text = "All work and no play makes Jack a dull boy. " * 23_000
    lines = (line_of(f"line-{k}", messages=[{"role": "user", "content": text}]) for k in range(203))
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    assert 200 * 2**20 < len(data) + 10 * 2**20 < 210 * 2**20
    batch = await make_batch(data)
    del data

    async def answer() -> None:
        while True:
            for claimed in await worker.claim(max_jobs=100):
                await worker.serve(claimed, 1)
            await asyncio.sleep(0.005)

    answering = asyncio.create_task(answer())
    before, most = await run_batch(valkey_url, queue, storage_url)
    answering.cancel()
    await asyncio.wait([answering])
    done = await store.batch(batch.id)
    assert done is not None
    assert (done.status, done.counts.completed) == (Status.COMPLETED, 203)
    assert most - before < MOST_KIB


@pytest.mark.slow
async def test_fifty_thousand_lines_take_little_memory_and_each_ends_once(
    make_batch: Any, store: BatchStore, line_of: Any, valkey_url: str, queue: str,
    storage_url: str, read_lines: Any,
) -> None:  # fmt: skip
    lines = [line_of(f"line-{k // 2}", max_tokens=-1) for k in range(50_000)]
    batch = await make_batch(lines)
    before, most = await run_batch(valkey_url, queue, storage_url)
    done = await store.batch(batch.id)
    assert done is not None
    assert (done.counts.total, done.counts.failed) == (50_000, 50_000)
    errors = await read_lines(done.error_file_id)
    seen = Counter(each["custom_id"] for each in errors)
    assert len(seen) == 25_000
    assert set(seen.values()) == {2}
    assert most - before < MOST_KIB
