"""Faults around one worker: it rides them out, or goes away so that others can go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import redis

from inferq import SamplingParams
from inferq.cli import main
from inferq.embedded import EmbeddedServer
from inferq.protocol.keys import QueueKeys

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


def engine_of(worker) -> int:
    """Process id of the worker's engine: each thread lists the children it started."""
    lists = (Path("/proc") / str(worker.process.pid) / "task").glob("*/children")
    pids = [int(pid) for children in lists for pid in children.read_text().split()]
    [engine] = [
        pid for pid in pids if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return engine


@pytest.fixture
def own_server():
    with EmbeddedServer(appendonly=True) as server:
        yield server


def test_a_server_that_refuses_writes_for_a_while_costs_nothing(
    start_worker, connect, own_server, queue: str
) -> None:
    worker = start_worker(own_server.url, queue, lease_s=20)
    client = connect(own_server.url, queue)
    job = client.submit("Once upon a time", LONG)
    stream = job.stream(timeout_s=60)
    seen = [next(stream)]
    with redis.Redis.from_url(own_server.url) as raw:
        raw.config_set("min-replicas-to-write", 1)
        time.sleep(1.5)
        raw.config_set("min-replicas-to-write", 0)
    seen.extend(stream)
    offsets = [o for e in seen for o in range(e.offset, e.offset + len(e.token_ids))]
    assert offsets == list(range(LONG.max_tokens))
    assert job.result(timeout_s=5).attempts == 1
    assert worker.stop() == 0


def test_a_drain_while_the_server_is_away_ends_in_time_and_says_so(
    start_worker, connect, own_server, queue: str
) -> None:
    worker = start_worker(own_server.url, queue, lease_s=60, drain_timeout_s=1)
    client = connect(own_server.url, queue)
    job = client.submit("Once upon a time", LONG)
    next(job.stream(timeout_s=60))
    own_server.kill()
    started = time.monotonic()
    assert worker.stop() == 1
    assert time.monotonic() - started < 20
    assert "hand-over incomplete" in worker.log.read_text()


def test_a_stuck_engine_with_work_piling_up_ends_the_worker(
    start_worker, connect, valkey_url: str, queue: str
) -> None:
    worker = start_worker(
        valkey_url, queue, step_timeout_s=3, num_kv_blocks=5800, max_model_len=8192
    )
    client = connect(valkey_url, queue)
    os.kill(engine_of(worker), signal.SIGSTOP)
    for _ in range(12):
        client.submit([5] * 7000, SamplingParams(max_tokens=1))
    assert worker.process.wait(25) == 1
    assert "engine step exceeds its limit" in worker.log.read_text()


def test_a_killed_engine_ends_the_worker_and_its_job_goes_on_elsewhere_at_once(
    start_worker, connect, valkey_url: str, queue: str
) -> None:
    workers = {w.name: w for w in [start_worker(valkey_url, queue, lease_s=120) for _ in range(2)]}
    client = connect(valkey_url, queue)
    job = client.submit("Once upon a time", LONG)
    stream = job.stream(timeout_s=60)
    seen = [next(stream)]
    first = workers.pop(job.status().owner)
    os.kill(engine_of(first), signal.SIGKILL)
    assert first.process.wait(20) == 1
    seen.extend(stream)  # which waits no lease
    offsets = [o for e in seen for o in range(e.offset, e.offset + len(e.token_ids))]
    assert offsets == list(range(LONG.max_tokens))
    assert job.status().crashes == 1
    [second] = workers.values()
    assert second.stop() == 0
    with redis.Redis.from_url(valkey_url) as raw:
        assert raw.hlen(QueueKeys(queue).workers) <= 1


def test_an_engine_killed_in_a_drain_ends_it_and_its_job_goes_on_elsewhere_at_once(
    start_worker, connect, valkey_url: str, queue: str
) -> None:
    first = start_worker(valkey_url, queue, lease_s=120, drain_timeout_s=3600)
    client = connect(valkey_url, queue)
    job = client.submit("Once upon a time", LONG)
    stream = job.stream(timeout_s=60)
    seen = [next(stream)]
    engine = engine_of(first)
    first.signal(signal.SIGTERM)
    while "draining" not in first.log.read_text().replace("received, draining", ""):
        assert first.process.poll() is None
        time.sleep(0.01)
    os.kill(engine, signal.SIGKILL)
    assert first.process.wait(20) == 1
    assert "the engine process ended with status -9" in first.log.read_text()
    second = start_worker(valkey_url, queue, lease_s=120)
    seen.extend(stream)  # which waits no lease
    offsets = [o for e in seen for o in range(e.offset, e.offset + len(e.token_ids))]
    assert offsets == list(range(LONG.max_tokens))
    assert job.status().crashes == 1
    assert second.stop() == 0


def test_a_worker_that_is_asked_to_drain_hands_over_and_ends(
    start_worker, connect, valkey_url: str, queue: str
) -> None:
    worker = start_worker(valkey_url, queue, report_interval_s=0.5, drain_timeout_s=0.5)
    client = connect(valkey_url, queue)
    job = client.submit("Once upon a time", LONG)
    next(job.stream(timeout_s=60))
    assert main(["drain", worker.name, "--redis-url", valkey_url, "--queue", queue]) == 0
    assert worker.process.wait(20) == 0
    status = job.status()
    assert (status.state, status.crashes, status.handoffs) == ("released", 0, 1)
