"""The I/O side's handle on the engine process: starts it, sends requests, receives steps."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from inferq.protocol.errors import InferqError, ModelError
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.requests.request_events import RequestEvent
from inferq.worker.pipe.books import StepBooks
from inferq.worker.pipe.engine_output import EngineOutput
from inferq.worker.pipe.frame_pipe import FramePipe
from inferq.worker.pipe.frames import decode_events, decode_output

logger = structlog.get_logger("inferq.engine")

#: What the engine's process runs.
ENGINE_COMMAND: Final = (sys.executable, "-m", "inferq.worker.pipe.engine_process")
#: Seconds to let the process end by itself before it is killed.
STOP_TIMEOUT_S: Final = 5.0
#: Seconds between two looks whether it has.
POLL_S: Final = 0.01


class EngineDied(InferqError):
    """The engine process ended, or stood still for longer than it may."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded engine can hold; `pool_tokens` is its KV pool in tokens."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int

    @property
    def pool_tokens(self) -> int:
        """KV tokens of the whole pool."""
        return self.num_blocks * self.block_size


class EngineClient:
    """Runs one engine process; `on_outputs` is called on the event loop for each batch of steps.

    `command` starts the process; the number of its end of the pipe's descriptor is put behind it.
    """

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._command = command
        self.on_outputs: Callable[[Sequence[EngineOutput]], None] = _nobody_listens
        self.on_events: Callable[[Sequence[RequestEvent]], None] = _nobody_follows
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: FramePipe | None = None
        self._burial: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._dead = asyncio.Event()
        #: What is known of its end, once there is one.
        self._death = "the engine process closed its connection"
        self._unanswered: set[str] = set()
        self.steps = 0
        self.last_step_at = time.monotonic()
        self.stats: dict[str, int] = {}
        self._snapshot: asyncio.Future[tuple[float, bytes]] | None = None
        self.step_books = StepBooks()

    @property
    def is_dead(self) -> bool:
        """Whether the process has closed its pipe: it has ended, or is about to."""
        return self._dead.is_set()

    @property
    def is_busy(self) -> bool:
        """Whether the engine has requests that have not ended."""
        return bool(self._unanswered)

    @property
    def stalled_s(self) -> float:
        """Seconds since the engine last advanced; 0 while it has nothing to do."""
        return time.monotonic() - self.last_step_at if self.is_busy else 0.0

    async def start(self, options: dict[str, Any]) -> EngineInfo:
        """Start the process, load the model, and return what it can hold.

        Raises `ModelError` if the model cannot be served, `EngineDied` if the process ends.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._process, ours = _launch(self._command)
        _, self._pipe = await loop.create_connection(
            lambda: FramePipe(self._receive, self._lost), sock=ours
        )
        self._pipe.send([options])
        return await self._ready

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        resumed: Sequence[tuple[Sequence[int], bool]] = (),
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        traced: bool = False,
    ) -> None:
        """Hand a request to the engine.

        `resumed` has for each output the tokens generated before, and whether they end it. What
        happens to a `traced` request comes by `on_events`.
        """
        if not self._unanswered:
            self.last_step_at = time.monotonic()
        self._unanswered.add(request_id)
        self._send(
            [
                "add",
                request_id,
                list(prompt_token_ids),
                [[list(token_ids), is_finished] for token_ids, is_finished in resumed],
                params.to_wire(),
                priority,
                cache_salt,
                adapter,
                traced,
            ]
        )

    def abort(self, request_id: str) -> None:
        """Have the engine drop a request and free its blocks at once."""
        self._unanswered.discard(request_id)
        self._send(["abort", [[request_id, None]]])

    def abort_output(self, request_id: str, index: int) -> None:
        """Have the engine drop one output of a request of which others go on."""
        self._send(["abort", [[request_id, index]]])

    async def block_snapshot(self) -> tuple[float, bytes]:
        """Return what the blocks hold after the step under way, encoded for the queue.

        Before it the seconds for which the engine stood still. For one caller; an engine that has
        died never answers.
        """
        self._snapshot = asyncio.get_running_loop().create_future()
        self._send(["blocks"])
        return await self._snapshot

    async def wait_dead(self, timeout_s: float) -> None:
        """Wait until the process has closed its pipe, or the time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._dead.wait(), timeout_s)

    async def cause_of_death(self) -> str:
        """Return why an engine that is dead is so, with its exit status once that is known."""
        if self._burial is not None:
            await asyncio.wait({self._burial})
        return self._death

    async def stop(self) -> None:
        """End the process."""
        if self._process is None:
            return
        if self._pipe is not None:
            self._pipe.close()  # which ends the process, also in the middle of a step
        if not await _has_ended(self._process, STOP_TIMEOUT_S):
            self._process.kill()
            await _has_ended(self._process, None)

    def kill(self) -> None:
        """End the process without waiting for its step."""
        if self._process is not None:
            self._process.kill()

    def _send(self, frame: list[Any]) -> None:
        assert self._pipe is not None
        if not self.is_dead:
            self._pipe.send(frame)

    def _receive(self, frame: list[Any]) -> None:
        assert self._ready is not None
        match frame:
            case ["ready", info]:
                if not self._ready.done():
                    self._ready.set_result(EngineInfo(**info))
            case ["failed", message, field]:
                if not self._ready.done():
                    self._ready.set_exception(ModelError(message, field=field))
            case ["steps", steps, rows, stats, timed]:
                self.step_books.took(timed)
                self._take_steps(steps, rows, stats)
            case ["events", rows]:
                self.on_events(decode_events(rows))
            case ["blocks", seconds, snapshot]:
                if self._snapshot is not None and not self._snapshot.done():
                    self._snapshot.set_result((seconds, snapshot))

    def _take_steps(self, steps: int, rows: list[list[Any]], stats: dict[str, int]) -> None:
        if steps != self.steps:
            self.steps = steps
            self.last_step_at = time.monotonic()
        self.stats = stats
        outputs = [decode_output(row) for row in rows]
        self._unanswered.difference_update(
            output.request_id for output in outputs if output.request_finished
        )
        self.on_outputs(outputs)

    def _lost(self, error: Exception | None) -> None:
        # At once: what it ran goes on elsewhere, whatever becomes of the process.
        self._dead.set()
        self._burial = asyncio.get_running_loop().create_task(self._bury(error))

    async def _bury(self, error: Exception | None) -> None:
        """Find out how the process whose pipe is closed has ended."""
        assert self._process is not None
        assert self._ready is not None
        if await _has_ended(self._process, STOP_TIMEOUT_S):
            self._death = f"the engine process ended with status {self._process.returncode}"
        if error is not None:
            self._death = f"{self._death} ({type(error).__name__}: {error})"
        if not self._ready.done():
            self._ready.set_exception(EngineDied(self._death))


async def _has_ended(process: subprocess.Popen[bytes], timeout_s: float | None) -> bool:
    """Return whether a process has ended, as soon as it has, or the time is over."""
    # Not in a thread that waits: asyncio's own may all be in calls of others.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while process.poll() is None:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(POLL_S)
    return process.returncode is not None


def _launch(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the I/O side, which drains the engine
        )
    return process, ours


def _nobody_follows(events: Sequence[RequestEvent]) -> None:
    raise EngineDied(f"the engine sent {len(events)} events of requests that nobody traces")


def _nobody_listens(outputs: Sequence[EngineOutput]) -> None:
    if outputs:
        raise EngineDied("the engine sent outputs before anyone listened")
