"""The executor whose threads no process waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from inferq.worker.daemon_executor import DaemonExecutor, is_at_work

TIMEOUT_S = 60


@pytest.fixture
def executor() -> Iterator[DaemonExecutor]:
    made = DaemonExecutor(2, "test")
    yield made
    made.shutdown(cancel_futures=True)


async def test_results_and_faults_of_any_kind_reach_who_waits(executor: DaemonExecutor) -> None:
    class Panic(BaseException):
        pass

    def fail(kind: type[BaseException]) -> None:
        raise kind("so")

    in_thread = asyncio.get_running_loop().run_in_executor
    assert await in_thread(executor, sum, [1, 2]) == 3
    for kind in (ValueError, Panic):
        with pytest.raises(kind, match="so"):
            await in_thread(executor, fail, kind)
    # no future of asyncio takes that one: its waiter would never wake
    with pytest.raises(RuntimeError, match="StopIteration: so"):
        await asyncio.wait_for(in_thread(executor, fail, StopIteration), TIMEOUT_S)
    assert await in_thread(executor, sum, [3, 4]) == 7


def test_calls_run_in_as_many_daemon_threads_as_may_be(executor: DaemonExecutor) -> None:
    begun, goes_on = threading.Semaphore(0), threading.Event()
    threads: set[threading.Thread] = set()

    def call() -> None:
        threads.add(threading.current_thread())
        begun.release()
        goes_on.wait()

    calls = [executor.submit(call) for _ in range(5)]
    assert begun.acquire(timeout=TIMEOUT_S)
    assert begun.acquire(timeout=TIMEOUT_S)
    assert is_at_work()
    assert [call.running() for call in calls] == [True, True, False, False, False]
    assert calls[3].cancel()
    goes_on.set()
    done, _ = wait(calls, timeout=TIMEOUT_S)
    assert len(done) == 5
    assert calls[3].cancelled()
    assert len(threads) == 2
    assert all(thread.daemon for thread in threads)


def test_an_idle_thread_is_used_again(executor: DaemonExecutor) -> None:
    for _ in range(3):
        thread = executor.submit(threading.current_thread).result(TIMEOUT_S)
        assert executor._idle.acquire(timeout=TIMEOUT_S)  # until it is free again
        executor._idle.release()
        assert thread is executor._threads[0]
    assert len(executor._threads) == 1


def test_a_shut_executor_ends_what_waits_and_its_threads_and_takes_nothing() -> None:
    executor = DaemonExecutor(1, "test")
    begun, goes_on = threading.Event(), threading.Event()

    def call() -> str:
        begun.set()
        goes_on.wait()
        return "done"

    running, waiting = executor.submit(call), executor.submit(call)
    assert begun.wait(TIMEOUT_S)
    executor.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="test is shut down"):
        executor.submit(call)
    goes_on.set()
    assert running.result(TIMEOUT_S) == "done"
    executor.shutdown()
    assert not executor._threads[0].is_alive()
