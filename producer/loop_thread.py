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
        self._stopping = asyncio.Event()
        self._thread: threading.Thread | None = None
        #: The loop, once the thread has made it.
        self._loop: concurrent.futures.Future[asyncio.AbstractEventLoop] | None = None
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
                self._loop.add_done_callback(self._end)  # at once, unless it is only starting
            self._is_stopped = True
            thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(STOP_TIMEOUT_S)

    def _end(self, made: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        if made.exception() is None:
            made.result().call_soon_threadsafe(self._stopping.set)

    def _started(self) -> asyncio.AbstractEventLoop:
        """Return the loop, with the lock held.

        An interrupt while the thread starts leaves it to the next call, or to `stop`.
        """
        if self._is_stopped:
            raise InferqError("this client is closed")
        if not self._is_starting():
            self._loop = concurrent.futures.Future()
            self._thread = threading.Thread(
                target=self._main, args=(self._loop,), name="inferq-client", daemon=True
            )
            self._thread.start()
        assert self._loop is not None
        return self._loop.result()

    def _is_starting(self) -> bool:
        """Whether a thread makes the loop, or has made it."""
        if self._loop is None or self._thread is None or not self._thread.is_alive():
            return False
        return not self._loop.done() or self._loop.exception() is None

    def _main(self, made: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        if made is not self._loop:  # the start was interrupted, and another one came first
            return
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        try:
            loop = runner.get_loop()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the loop gets it
            made.set_exception(error)
            return
        with runner:
            made.set_result(loop)
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
