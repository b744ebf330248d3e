"""The private event loop: whatever meets its end comes back, with an answer or a typed error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any

import pytest

from inferq.producer import loop_thread
from inferq.producer.loop_thread import LoopThread
from inferq.protocol.errors import InferqError

#: Longer than anything here takes, in seconds: a call that hangs fails instead.
HANGS_S = 60.0


async def nothing() -> None:
    pass


async def one() -> int:
    return 1


def call(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or the error that it raises, unless it hangs."""
    outcome: list[Any] = []

    def main() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            outcome.append(error)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    thread.join(HANGS_S)
    assert outcome, "the call hangs"
    return outcome[0]


class ObservedLock:
    """A lock that tells when somebody has to wait for it."""

    def __init__(self, lock: Any, tell: Callable[[], None]) -> None:
        self._lock = lock
        self._tell = tell

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._tell()
            self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    made = LoopThread(nothing)
    yield made
    made.stop()


def test_a_stop_during_a_call_waits_for_it_to_be_handed_over(loop: LoopThread) -> None:
    assert loop.run(one) == 1
    may_go_on = threading.Event()
    loop._lock = ObservedLock(loop._lock, may_go_on.set)  # type: ignore[assignment]

    def stop() -> None:
        loop.stop()
        may_go_on.set()

    def work() -> Coroutine[Any, Any, int]:
        threading.Thread(target=stop, daemon=True).start()
        assert may_go_on.wait(HANGS_S)
        return one()

    assert call(lambda: loop.run(work)) == 1


def test_a_call_in_progress_ends_with_an_error_when_the_loop_is_stopped(loop: LoopThread) -> None:
    async def work() -> None:
        threading.Thread(target=loop.stop, daemon=True).start()
        await asyncio.Event().wait()

    assert isinstance(call(lambda: loop.run(work)), InferqError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_after_an_end_that_nobody_asked_for_are_refused() -> None:
    stopped = threading.Event()

    async def on_stop() -> None:
        stopped.set()

    loop = LoopThread(on_stop)

    async def leave() -> None:
        raise SystemExit

    assert isinstance(call(lambda: loop.run(leave)), SystemExit)
    assert stopped.wait(HANGS_S)
    with pytest.raises(InferqError, match="closed"):
        loop.run(one)
    loop.stop()


def test_a_call_during_the_end_is_refused() -> None:
    refusals: list[Any] = []

    async def on_stop() -> None:
        refusals.append(await asyncio.to_thread(call, lambda: loop.run(one)))

    loop = LoopThread(on_stop)
    loop.run(one)
    loop.stop()
    (refusal,) = refusals
    assert isinstance(refusal, InferqError)


@pytest.mark.parametrize("step", ["new_event_loop", "Thread"])
def test_a_loop_that_cannot_start_fails_the_call(
    loop: LoopThread, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no more of these")

    with monkeypatch.context() as patch:
        place = loop_thread.asyncio if step == "new_event_loop" else threading.Thread
        patch.setattr(place, step if step == "new_event_loop" else "start", fail)
        with pytest.raises(OSError, match="no more"):
            loop.run(one)
    assert loop.run(one) == 1


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_interrupt_while_the_loop_starts_leaves_nothing_half_made(
    loop: LoopThread, is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if is_begun:
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.run(one)
    assert call(lambda: loop.run(one)) == 1
    assert sum(t.name == "inferq-client" for t in threading.enumerate()) == 1


def test_a_loop_whose_start_was_interrupted_is_ended(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_begin, threads = threading.Event(), []
    make = asyncio.new_event_loop

    def make_late() -> asyncio.AbstractEventLoop:
        threads.append(threading.current_thread())
        assert may_begin.wait(HANGS_S)
        return make()

    def interrupted(made: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop_thread.asyncio, "new_event_loop", make_late)
    monkeypatch.setattr(loop_thread.concurrent.futures.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run(one)
    monkeypatch.undo()
    stopping = threading.Thread(target=loop.stop, daemon=True)
    stopping.start()
    may_begin.set()
    stopping.join(HANGS_S)
    (thread,) = threads
    thread.join(HANGS_S)
    assert not thread.is_alive()
