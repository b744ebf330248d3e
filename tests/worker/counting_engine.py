"""An engine process without a model: the real scheduler and blocks, and tokens that count up.

Its first step waits for as many requests as `COUNTING_ENGINE_REQUESTS` says, so that what happens
does not hang on when they come.
"""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine, TokenOutput
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.engine.scheduling.plan import SampledToken, SequenceResult, StepPlan
from inferq.worker.pipe import engine_process

VOCAB_SIZE = 1000
MAX_MODEL_LEN = 512


class CountingRunner:
    """Samples the number of tokens that there are."""

    def execute(self, plan: StepPlan) -> Sequence[SequenceResult]:
        return [
            SequenceResult(
                tuple(
                    SampledToken(len(item.sequence.token_ids) % VOCAB_SIZE)
                    for _ in (item.children or (0,))
                )
                if item.samples
                else ()
            )
            for item in plan.scheduled
        ]


class WaitingEngine(Engine):
    """Does nothing until all requests of the test have come."""

    _awaited = int(os.environ.get("COUNTING_ENGINE_REQUESTS", "1"))

    def add_request(self, request: EngineRequest) -> None:
        super().add_request(request)
        self._awaited -= 1

    def step(self) -> list[TokenOutput]:
        if self._awaited > 0:
            time.sleep(0.001)
            return []
        return super().step()


def load_engine(config: EngineConfig, **_options: object) -> Engine:
    assert config.num_kv_blocks is not None
    return WaitingEngine(
        config,
        CountingRunner(),  # type: ignore[arg-type]
        num_blocks=config.num_kv_blocks,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset(),
        vocab_size=VOCAB_SIZE,
        num_swap_blocks=config.num_swap_blocks or 0,
    )


if __name__ == "__main__":
    # in place of the module that loads models, and torch with them
    factory: Any = types.ModuleType("inferq.worker.factory")
    factory.load_engine = load_engine
    sys.modules[factory.__name__] = factory
    sys.exit(engine_process.main(Connection(int(sys.argv[1]))))
