"""The client for plain code: threads, forks, running loops, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inferq.producer import AsyncClient, Client
from inferq.protocol.errors import InferqError, JobCancelled, ResultTimeout, ServerLost


def test_submit_stream_and_result_without_any_loop(sync_client: Client, worker_thread: Any) -> None:
    job = sync_client.submit("x")
    worker_thread.serve_next(4)
    with job.stream() as stream:
        events = list(stream)
    assert [t for e in events for t in e.token_ids] == [0, 1, 2, 3]
    assert stream.terminal is not None
    assert stream.next_offset == 4
    assert list(stream) == []
    assert job.result().text == "0 1 2 3 "
    assert [t for e in job.stream(2) for t in e.token_ids] == [2, 3]
    assert job.status().state == "done"
    assert job.cancel() == "finished"
    assert sync_client.workers() == []
    assert sync_client.job(job.id).result() == job.result()


def test_errors_come_through_as_they_are(sync_client: Client) -> None:
    job = sync_client.submit("x")
    with pytest.raises(ResultTimeout):
        job.result(timeout_s=0.1)
    assert job.cancel() == "cancelled"
    with pytest.raises(JobCancelled):
        next(job.stream())


def test_many_threads_share_one_client(sync_client: Client, worker_thread: Any) -> None:
    def ask(i: int) -> tuple[int, ...]:
        return sync_client.submit([i]).result(timeout_s=20).token_ids

    others = client_threads()
    with ThreadPoolExecutor(17) as pool:
        served = pool.submit(worker_thread.serve_jobs, 48, 3)
        answers = [pool.submit(ask, i) for i in range(48)]
        assert {answer.result() for answer in answers} == {(0, 1, 2)}
        served.result()
    assert len(client_threads() - others) == 1


def client_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "inferq-client"}


async def test_it_works_where_a_loop_runs_already(sync_client: Client, worker: Any) -> None:
    job = sync_client.submit("x")
    await worker.serve((await worker.claim_one())[0], 2)
    assert job.result().token_ids == (0, 1)


def test_a_forked_child_gets_connections_of_its_own(
    sync_client: Client, worker_thread: Any
) -> None:
    job = sync_client.submit("x")
    worker_thread.serve_next(3)
    stream = job.stream()
    next(stream)
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of threads and fork
        child = os.fork()
    if child == 0:
        said = b"wrong"
        with contextlib.suppress(Exception):
            with pytest.raises(InferqError, match="fork"):
                next(stream)
            answer = sync_client.job(job.id).result(timeout_s=10)
            fresh = sync_client.submit("y")
            said = f"{answer.text}|{fresh.created}".encode()
            sync_client.close()
        os.write(write_end, said)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert pipe.read() == b"0 1 2 |True"
    assert os.waitpid(child, 0)[1] == 0
    # the parent goes on where it was
    assert [t for e in stream for t in e.token_ids] == [1, 2]
    assert job.status().state == "done"


def test_close_ends_the_thread_and_refuses_more(valkey_url: str, queue: str) -> None:
    client = Client(valkey_url, queue)
    job = client.submit("x")
    stream = job.stream()
    waiting = ThreadPoolExecutor(1).submit(next, stream)
    time.sleep(0.1)
    thread = client._backend.loop._thread
    client.close()
    client.close()
    assert thread is not None
    assert not thread.is_alive()
    with pytest.raises(InferqError, match="closed"):
        waiting.result(5)
    with pytest.raises(InferqError, match="closed"):
        client.submit("y")
    with pytest.raises(InferqError, match="closed"):
        next(stream)
    stream.close()


def test_a_stream_closed_by_another_thread_ends(sync_client: Client, worker_thread: Any) -> None:
    job = sync_client.submit("x")
    stream = job.stream()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(list, stream)
        while stream._stream._subscription is None:
            time.sleep(0.01)
        stream.close()
        assert waiting.result(60) == []
    assert stream.terminal is None
    unused = job.stream()
    unused.close()
    assert list(unused) == []
    # the job goes on
    worker_thread.serve_next(1)
    assert job.result().token_ids == (0,)


def test_a_client_that_is_dropped_ends_its_thread(valkey_url: str, queue: str) -> None:
    client = Client(valkey_url, queue)
    client.ping()
    thread = client._backend.loop._thread
    assert thread is not None
    del client
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_a_client_that_was_never_used_starts_nothing(valkey_url: str) -> None:
    others = client_threads()
    with Client(valkey_url):
        assert not client_threads() - others


def test_an_interrupt_while_waiting_comes_through(valkey_url: str, queue: str) -> None:
    program = (
        "import os, signal, threading\n"
        "from inferq import Client\n"
        f"client = Client({valkey_url!r}, {queue!r})\n"
        "job = client.submit('x')\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    job.result()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', job.status().state)\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (run.stdout, run.stderr) == ("interrupted queued\n", "")


def test_a_script_that_forgets_to_close_ends_quietly(valkey_url: str, queue: str) -> None:
    program = (
        "from inferq import Client\n"
        f"client = Client({valkey_url!r}, {queue!r})\n"
        "stream = client.submit('x').stream(timeout_s=0.2)\n"
        "try:\n    next(stream)\nexcept TimeoutError:\n    print('ok')\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", program],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "ok\n", "")


def test_no_server_is_a_typed_error_here_too(
    unused_tcp_port: int, make_client: Callable[..., Client]
) -> None:
    client = make_client(f"redis://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(ServerLost):
        client.submit("x")


async def test_an_asyncio_client_says_so_on_another_loop(client: AsyncClient) -> None:
    await client.ping()
    with pytest.raises(InferqError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(client.ping()))
