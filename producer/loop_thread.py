"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from inferq.protocol.errors import InferqError

#: Longest wait for the loop's thread to end, in seconds.
STOP_TIMEOUT_S: Final = 10.0

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any number of threads of one process; starts at the first.

    `on_stop` is awaited on the loop before it ends. The thread is a daemon: it never keeps a
    process alive.
    """

    def __init__(self, on_stop: Callable[[], Awaitable[None]]) -> None:
        self._on_stop = on_stop
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work()` on the loop and return its result; an interrupt here cancels it there."""
        if self._process != os.getpid():
            raise InferqError("this belongs to the parent process: make a new one after a fork")
        loop = self._started()
        future = asyncio.run_coroutine_threadsafe(work(), loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise InferqError("the client was closed") from None
        finally:
            future.cancel()

    def stop(self) -> None:
        """End the loop, and wait for it unless called on it (by the garbage collector)."""
        with self._lock:
            self._is_stopped = True
            thread, loop, stopping = self._thread, self._loop, self._stopping
        if thread is None or loop is None or stopping is None or not thread.is_alive():
            return
        loop.call_soon_threadsafe(stopping.set)
        if thread is not threading.current_thread():
            thread.join(STOP_TIMEOUT_S)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._is_stopped:
                raise InferqError("this client is closed")
            if self._loop is None:
                ready = threading.Event()
                self._thread = threading.Thread(
                    target=self._main, args=(ready,), name="inferq-client", daemon=True
                )
                self._thread.start()
                ready.wait()
            assert self._loop is not None
            return self._loop

    def _main(self, ready: threading.Event) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._serve(ready))

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        ready.set()
        await self._stopping.wait()
        await self._on_stop()
