"""An event loop on a thread of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from inferq.protocol.errors import InferqError

#: Longest wait for the loop's thread to end, in seconds.
STOP_TIMEOUT_S: Final = 10.0

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any number of threads of one process; starts at the first.

    `on_stop` is awaited on the loop before it ends. The thread is a daemon: it never keeps a
    process alive. Whatever was handed over before the end is run or cancelled, nothing is left.
    """

    def __init__(self, on_stop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._on_stop = on_stop
        self._process = os.getpid()
        # the garbage collector may call `stop` wherever a thread stands
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work()` on the loop and return its result; an interrupt here cancels it there.

        Raises `InferqError` when the loop was stopped, before or meanwhile, or is a parent's.
        """
        if self._process != os.getpid():
            raise InferqError("this belongs to the parent process: make a new one after a fork")
        with self._lock:  # `stop` must not come between, or nobody would ever run it
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
            if not self._is_stopped and self._loop is not None:
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._is_stopped = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_TIMEOUT_S)

    def _started(self) -> asyncio.AbstractEventLoop:
        """Return the loop, with the lock held."""
        if self._is_stopped:
            raise InferqError("this client is closed")
        if self._loop is None:
            # made here, so that a failure is the caller's, who would wait for ever on the thread
            loop = asyncio.new_event_loop()
            thread = threading.Thread(
                target=self._main, args=(loop,), name="inferq-client", daemon=True
            )
            try:
                thread.start()
            except BaseException:
                loop.close()
                raise
            self._loop, self._thread = loop, thread
        return self._loop

    def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(self._serve())
            finally:
                # also where work ended the loop by SystemExit: no more is taken, and what was
                # handed over begins at the latest now, so that the runner finds and cancels it
                with self._lock:
                    self._is_stopped = True
                runner.run(self._on_stop())

    async def _serve(self) -> None:
        await self._stopping.wait()
