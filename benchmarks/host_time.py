"""What the host does in a step, apart from the model: planning, inputs, sampled tokens, outputs.

python benchmarks/host_time.py [--sequences 256] [--steps 300]

The engine is the real one, as are the inputs and the results; the device is a stand-in that knows
all tokens at once. Each form of a step prints one JSON line with the medians: `schedule_ms`,
`inputs_ms` (with the sampler's columns), `results_ms` (from the sampled tokens to one result for
each sequence) and `step_ms`, the whole step; what is missing in between is the engine's own part:
tokens are appended, ends found, outputs made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.engine.sampling.host_copy import HostCopy
from inferq.worker.engine.sampling.sampler import Sampling
from inferq.worker.engine.scheduling.plan import SequenceResult, StepPlan
from inferq.worker.model.running.step_inputs import StepInputBuilder, StepSamples
from inferq.worker.model.running.step_results import step_results

VOCAB_SIZE = 49_152
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
PROMPT = 200

#: What requests ask, by the name of the run.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "four outputs": {"n": 4},
}

_T = TypeVar("_T")


class Clock:
    """Seconds by name, one entry for each step."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def measure(self, name: str, work: Callable[[], _T]) -> _T:
        """Call `work` and note how long it takes."""
        start = time.perf_counter()
        result = work()
        self.seconds[name].append(time.perf_counter() - start)
        return result


@dataclass(frozen=True)
class StandInStep:
    """A step whose tokens are known."""

    clock: Clock
    plan: StepPlan
    inputs: StepSamples

    def results(self) -> list[SequenceResult]:
        """Turn the sampled tokens into results, as `DecoderRunner` does."""
        return self.clock.measure("results_ms", self._results)

    def _results(self) -> list[SequenceResult]:
        rows = self.inputs.sampled
        children = self.inputs.asks.children if self.inputs.asks else None
        count = len(rows) if children is None else sum(map(len, children))
        found = torch.full((count + len(rows),), 10)
        sampling = Sampling(found[:count], HostCopy(found), count, [None] * count, [])
        return step_results(self.plan, self.inputs, sampling.finish(), {})


class StandInRunner:
    """Builds a step's inputs like `DecoderRunner`, in the form for CUDA graphs if told to."""

    def __init__(self, clock: Clock, max_num_seqs: int, *, graphs: bool) -> None:
        self._clock = clock
        self._size = max_num_seqs
        self._graphs = graphs
        self._builder = StepInputBuilder(
            max_num_seqs=max_num_seqs,
            max_num_tokens=8192,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            device=torch.device("cpu"),
        )

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        """Do the host's part of a step."""
        return self.launch(plan).results()

    def launch(self, plan: StepPlan) -> StandInStep:
        """Do the part before the device's."""
        inputs = self._clock.measure("inputs_ms", lambda: self._build(plan))
        return StandInStep(self._clock, plan, inputs)

    def _build(self, plan: StepPlan) -> StepSamples:
        if self._graphs and all(item.samples and item.num_tokens == 1 for item in plan.scheduled):
            return self._builder.build_decodes(plan, self._size)
        return self._builder.build(plan)


def run(kind: str, sequences: int, steps: int, *, ahead: bool) -> dict[str, Any]:
    """Measure decode steps of so many running sequences; `ahead` as on CUDA, with its inputs."""
    clock = Clock()
    config = EngineConfig(model="none", max_num_batched_tokens=8192, max_num_seqs=sequences)
    engine = Engine(
        config,
        StandInRunner(clock, sequences, graphs=ahead),
        num_blocks=sequences * (MAX_MODEL_LEN // BLOCK_SIZE),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset({2}),
        vocab_size=VOCAB_SIZE,
        launches_ahead=ahead,
    )
    scheduler = engine._scheduler  # noqa: SLF001 - a part of the step is measured
    schedule = scheduler.schedule
    scheduler.schedule = lambda: clock.measure("schedule_ms", schedule)  # type: ignore[method-assign]
    per_request = KINDS[kind].get("n", 1)
    for index in range(sequences // per_request):
        params = SamplingParams(seed=index, max_tokens=3000, ignore_eos=True, **KINDS[kind])
        prompt = tuple((index * 7 + place) % 1000 + 3 for place in range(PROMPT))
        engine.add_request(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                params=params,
                arrival=float(index),
            )
        )
    while engine.stats().num_running < sequences:
        engine.step()
    for _ in range(20):
        engine.step()
    clock.seconds.clear()
    for _ in range(steps):
        clock.measure("step_ms", engine.step)
    medians = {name: 1e3 * statistics.median(each) for name, each in clock.seconds.items()}
    return {
        "benchmark": "host_time",
        "kind": kind,
        "sequences": sequences,
        "launches_ahead": ahead,
        **{name: round(value, 3) for name, value in medians.items()},
    }


def main() -> None:
    """Print one line for each kind of request, with and without launching ahead."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=256, help="running sequences")
    parser.add_argument("--steps", type=int, default=300, help="steps measured for each line")
    options = parser.parse_args()
    for kind in KINDS:
        for ahead in (False, True):
            print(json.dumps(run(kind, options.sequences, options.steps, ahead=ahead)))


if __name__ == "__main__":
    main()
