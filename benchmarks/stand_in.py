"""A worker whose engine computes nothing: one token for each running request in each fixed step.

python benchmarks/stand_in.py worker STEP_MS TRACE [the worker's flags]

All but the engine is the real thing: both processes, the pipe, the I/O side. Whenever the engine
has nothing more to do, it adds to the file TRACE one JSON line for each request: its name, when it
came, and when each token was there, in seconds of the monotonic clock. From the first to the second
is what the engine alone takes; it includes the rest of the step that was under way.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import sys
import time
import types
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from inferq.protocol.messages import FinishReason
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.engine.requests.token_output import TokenOutput
from inferq.worker.engine.stats import EngineStats
from inferq.worker.pipe import engine_process
from inferq.worker.pipe.frames import unpack

VOCAB_SIZE = 32_000
MAX_MODEL_LEN = 4096
NUM_BLOCKS = 100_000


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer whose tokens are made-up words of 1 to 8 letters."""
    rng = random.Random(0)
    words = {
        f"Ġ{''.join(rng.choices(string.ascii_lowercase, k=rng.randint(0, 7)))}{index}": index
        for index in range(VOCAB_SIZE)
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="Ġ0"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


class StandInEngine:
    """What the engine's process needs of an engine; each step sleeps for `step_s`."""

    max_model_len = MAX_MODEL_LEN
    vocab_size = VOCAB_SIZE

    def __init__(self, step_s: float, trace: Path, arrivals: dict[str, float]) -> None:
        self._step_s = step_s
        self._trace = trace
        self._arrivals = arrivals
        self._left: dict[str, int] = {}
        self._times: dict[str, list[float]] = {}
        self._num_steps = 0

    def add_request(self, request: EngineRequest) -> None:
        """Let a request run from the next step on."""
        assert request.params.max_tokens is not None
        self._left[request.request_id] = request.params.max_tokens
        self._times[request.request_id] = [self._arrivals.pop(request.request_id)]

    def abort(self, request_id: str, index: int | None = None) -> bool:  # noqa: ARG002
        """Drop a request."""
        return self._left.pop(request_id, None) is not None

    def has_work(self) -> bool:
        """Whether a request runs."""
        return bool(self._left)

    def step(self) -> list[TokenOutput]:
        """Wait for the time of a step, then bring one token to each request."""
        if not self._left:
            return []
        time.sleep(self._step_s)
        self._num_steps += 1
        token_ids = (self._num_steps % VOCAB_SIZE,)
        outputs = []
        for request_id, left in list(self._left.items()):
            is_last = left == 1
            outputs.append(
                TokenOutput(
                    request_id,
                    token_ids,
                    finish_reason=FinishReason.LENGTH if is_last else None,
                    request_finished=is_last,
                )
            )
            self._left[request_id] = left - 1
            if is_last:
                del self._left[request_id]
        now = time.monotonic()
        for output in outputs:
            self._times[output.request_id].append(now)
        if not self._left:
            self._write_trace()
        return outputs

    def take_events(self) -> tuple[()]:
        """Return nothing: no request is traced."""
        return ()

    def stats(self) -> EngineStats:
        """Return numbers of an engine that has always room."""
        return EngineStats(
            len(self._left), 0, 0, NUM_BLOCKS, NUM_BLOCKS, *[0] * 8, self._num_steps, 0, 0
        )

    def _write_trace(self) -> None:
        with self._trace.open("a") as trace:
            for request_id, times in self._times.items():
                trace.write(json.dumps([request_id.partition(":")[0], *times]) + "\n")
        self._times.clear()


def run_engine(step_ms: str, trace: str, descriptor: str) -> int:
    """Run the engine's process around a stand-in; return its exit status."""

    arrivals: dict[str, float] = {}

    def unpack_and_note(data: bytes) -> list[Any]:
        frame = unpack(data)
        if frame[0] == "add":
            arrivals[frame[1]] = time.monotonic()
        return frame

    def load_engine(_: EngineConfig, **_options: object) -> StandInEngine:
        return StandInEngine(float(step_ms) / 1000, Path(trace), arrivals)

    engine_process.unpack = unpack_and_note  # type: ignore[attr-defined]

    # In place of the module that loads models, and torch with them.
    factory: Any = types.ModuleType("inferq.worker.factory")
    factory.load_engine = load_engine
    sys.modules[factory.__name__] = factory
    return engine_process.main(Connection(int(descriptor)))


def run_worker(step_ms: str, trace: str, flags: Sequence[str]) -> int:
    """Run a worker with that engine; return its exit status."""
    from inferq.runtime.logs import configure_logging
    from inferq.worker.command import build_parser
    from inferq.worker.pipe.engine_client import EngineClient
    from inferq.worker.service import WorkerService
    from inferq.worker.settings import load_settings

    settings = load_settings(vars(build_parser().parse_args(flags)))
    configure_logging(settings.log_level, settings.log_format)
    engine = EngineClient([sys.executable, __file__, "engine", step_ms, trace])
    return asyncio.run(WorkerService(settings, engine).run())


if __name__ == "__main__":
    role, step_ms, trace, *rest = sys.argv[1:]
    sys.exit(
        run_engine(step_ms, trace, *rest) if role == "engine" else run_worker(step_ms, trace, rest)
    )
