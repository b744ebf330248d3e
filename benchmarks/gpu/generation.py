"""Section: nano-vllm's benchmark on Qwen3-0.6B's shape, the whole engine at work.

Its workload: seed 0, 256 sequences, prompts and outputs of 100 to 1024 random tokens, temperature
0.6, end tokens ignored: 133,966 output tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator

from gpu.random_model import QWEN3_06B, RandomWeights, engine_of, fitting_blocks, request, shape
from gpu.records import Quantity, Record
from gpu.section import Case, Settings

_SEQUENCES, _SHORTEST, _LONGEST, _TOKEN_IDS = 256, 100, 1024, 10_000
OUTPUT_TOKENS = 133_966


def workload() -> list[tuple[list[int], int]]:
    """Return its prompts and output lengths, drawn in its order."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, _TOKEN_IDS) for _ in range(rng.randint(_SHORTEST, _LONGEST))]
        for _ in range(_SEQUENCES)
    ]
    return [(prompt, rng.randint(_SHORTEST, _LONGEST)) for prompt in prompts]


def cases(settings: Settings) -> Iterable[Case]:
    """Give the case."""
    return (Case("nano-vllm's workload", lambda: _run(settings)),)


def _run(settings: Settings) -> Iterator[Record]:
    requests = workload()
    if (total := sum(length for _, length in requests)) != OUTPUT_TOKENS:
        raise RuntimeError(f"the workload has {total} output tokens")
    if settings.smoke:
        requests = [([token % 320 for token in prompt[:9]], 5) for prompt, _ in requests[:3]]
    config = shape(QWEN3_06B, settings)
    blocks = 200 if settings.smoke else _SEQUENCES * 2048 // 16
    with engine_of(
        config,
        RandomWeights(),
        settings,
        max_model_len=2048,
        max_num_seqs=_SEQUENCES,
        max_num_batched_tokens=16_384,
        num_kv_blocks=fitting_blocks(config, blocks, settings),
    ) as loaded:
        engine = loaded.engine
        engine.add_request(request("warm", [1] * 16, 8))
        while engine.has_work():
            engine.step()
        for index, (prompt, length) in enumerate(requests):
            engine.add_request(request(str(index), prompt, length, seed=index))
        before = engine.stats().num_steps
        start = time.perf_counter()
        tokens = 0
        while engine.has_work() and settings.seconds_left > 0:
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(str(output.error))
                tokens += len(output.token_ids)
        seconds = time.perf_counter() - start
        stats = engine.stats()
        done = not engine.has_work()
    wanted = sum(length for _, length in requests)
    if done and tokens != wanted:
        raise RuntimeError(f"{tokens} tokens came out instead of {wanted}")
    steps = stats.num_steps - before
    yield Record(
        "nano-vllm's workload",
        {
            "throughput": Quantity(tokens / seconds, "output tokens/s"),
            "seconds": Quantity(seconds, "s"),
            "tokens": Quantity(tokens),
            "steps": Quantity(steps),
            "step": Quantity(seconds / max(steps, 1) * 1e3, "ms, mean"),
            "preemptions": Quantity(stats.num_preemptions),
        },
        note="" if done else f"stopped: the time was up after {tokens} of {wanted} tokens",
    )
