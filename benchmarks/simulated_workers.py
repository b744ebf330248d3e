"""The real I/O side of many workers in one process, each driven by a generator of tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import FinishReason
from inferq.protocol.params import SamplingParams
from inferq.protocol.scripts import QueueScripts
from inferq.worker.engine.requests.request_events import RequestEvent
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.pipe.engine_client import EngineClient, EngineInfo
from inferq.worker.pipe.engine_output import EngineOutput
from inferq.worker.queue.script_connection import ScriptConnection
from inferq.worker.service import WorkerSession, connect
from inferq.worker.settings import WorkerSettings

VOCAB_SIZE = 32_000


@dataclass(slots=True)
class TokenGenerator:
    """Stands where the engine's process is: one token per request and step, up to `max_tokens`.

    What falls due while the event loop is busy comes in one batch, as it does from the pipe.
    """

    step_s: float
    on_outputs: Callable[[Sequence[EngineOutput]], None] | None = None
    on_events: Callable[[Sequence[RequestEvent]], None] | None = None
    is_dead: bool = False
    death: str | None = None
    is_busy: bool = False
    stalled_s: float = 0.0
    stats: dict[str, int] = field(default_factory=dict)
    #: Tokens handed over so far.
    num_tokens: int = 0
    #: How many tokens each request still gets.
    _running: dict[str, int] = field(default_factory=dict)

    def add(self, request_id: str, _: Sequence[int], params: SamplingParams, **__: Any) -> None:
        """Let a request run."""
        assert params.max_tokens is not None
        self._running[request_id] = params.max_tokens

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        self._running.pop(request_id, None)

    async def run(self, until: asyncio.Event) -> None:
        """Generate."""
        start, done = time.perf_counter(), 0
        while not until.is_set():
            await asyncio.sleep(max(0.0, start + (done + 1) * self.step_s - time.perf_counter()))
            due = int((time.perf_counter() - start) / self.step_s) - done
            if due > 0:
                done += due
                tokens = tuple((done + i) % VOCAB_SIZE for i in range(due))
                outputs = [self._advance(request_id, tokens) for request_id in [*self._running]]
                self.num_tokens += sum(len(output.token_ids) for output in outputs)
                self.on_outputs(outputs)

    def _advance(self, request_id: str, tokens: tuple[int, ...]) -> EngineOutput:
        left = self._running[request_id]
        if left > len(tokens):
            self._running[request_id] = left - len(tokens)
            return EngineOutput(request_id, 0, tokens)
        del self._running[request_id]
        return EngineOutput(
            request_id, 0, tokens[:left], finish_reason=FinishReason.LENGTH, request_finished=True
        )

    async def wait_dead(self, timeout_s: float) -> None:
        """Wait: it never ends by itself."""
        await asyncio.sleep(timeout_s)

    def kill(self) -> None:
        """Refuse: nothing here can get stuck."""
        raise RuntimeError("the generator was taken for stuck")


@dataclass(slots=True)
class SimulatedWorker:
    """One worker's session on its generator."""

    generator: TokenGenerator
    session: WorkerSession
    connection: ScriptConnection

    @property
    def num_running(self) -> int:
        """Jobs that generate."""
        return len(self.generator._running)  # noqa: SLF001 - of this module


def make_worker(
    name: str, url: str, keys: QueueKeys, tokenizer: Tokenizer, *, streams: int, step_s: float
) -> SimulatedWorker:
    """Return a worker that holds up to `streams` jobs."""
    settings = WorkerSettings(
        model="stand-in",
        redis_url=url,  # type: ignore[arg-type] - pydantic makes a secret of it
        queue=keys.queue,
        worker_name=name,
        max_jobs=streams,
        lease_s=30.0,
        log_level="error",
    )
    generator = TokenGenerator(step_s)
    client = connect(url, keys)
    connection = ScriptConnection(client)
    info = EngineInfo(
        num_blocks=1_000_000, block_size=16, max_model_len=100_000, vocab_size=VOCAB_SIZE
    )
    session = WorkerSession(
        settings,
        keys,
        client,
        QueueScripts(connection, keys),
        cast("EngineClient", generator),
        info,
        tokenizer,
    )
    return SimulatedWorker(generator, session, connection)


def endless_params() -> SamplingParams:
    """Return parameters of a job that outlives the measurement."""
    return SamplingParams(max_tokens=50_000, ignore_eos=True)
