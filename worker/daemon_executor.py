"""Threads for calls that take their time, which the end of the process does not wait for.

Python joins the threads of a `ThreadPoolExecutor`, asyncio's own among them, before a process ends:
a worker would outlive its drain by whatever they are in the middle of.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

#: What a thread does next; None: end.
_Call = tuple[Future[Any], Callable[[], Any]] | None


class DaemonExecutor(Executor):
    """Runs calls in at most `max_workers` threads, which are started as they are needed.

    What waits for a thread can be cancelled, by its future; what has begun goes on to its end, or
    to that of the process.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        self._max_workers = max_workers
        self._name = name
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[_DaemonThread] = []
        self._is_shut = False

    def submit(
        self,
        fn: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Future[Result]:
        """Run a call as soon as a thread is free; raises `RuntimeError` after `shutdown`."""
        future: Future[Result] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError(f"the executor {self._name} is shut down")
            self._calls.put((future, partial(fn, *args, **kwargs)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._max_workers:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(_DaemonThread(self._calls, self._idle, name))
                self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end after the calls there are; `cancel_futures`: after those begun."""
        with self._lock:
            self._is_shut = True
            if cancel_futures:
                with contextlib.suppress(Empty):
                    while (call := self._calls.get_nowait()) is not None:
                        call[0].cancel()
            for _ in self._threads:
                self._calls.put(None)
        if wait:
            for thread in self._threads:
                thread.join()


class _DaemonThread(threading.Thread):
    """One thread of an executor; `is_at_work` while it is in a call."""

    def __init__(self, calls: SimpleQueue[_Call], idle: threading.Semaphore, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._calls = calls
        self._idle = idle
        self.is_at_work = False

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            self.is_at_work = True
            _settle(*call)
            del call  # nothing of it is kept until the next one
            self.is_at_work = False
            self._idle.release()


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except StopIteration as error:  # which no future of asyncio takes: its waiter would never wake
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
    except BaseException as error:  # noqa: BLE001 - whoever waits gets it, as of any executor
        future.set_exception(error)


def is_at_work() -> bool:
    """Whether a thread of any executor here is in a call."""
    return any(
        thread.is_at_work for thread in threading.enumerate() if isinstance(thread, _DaemonThread)
    )
