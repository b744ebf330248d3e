"""Random histories of a real engine on a small model: nothing that happens changes a token."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.sequence import EngineRequest

Make = Callable[..., Any]
Outputs = dict[tuple[str, int], list[int]]


@pytest.fixture
def engine_of(engine_over: Make) -> Make:
    def make(folder: Path, rng: random.Random | None = None, **options: Any) -> Engine:
        config = EngineConfig(model=str(folder), device="cpu", max_model_len=96, **options)
        engine: Engine = engine_over(config, rng=rng)
        return engine

    return make


def random_requests(rng: random.Random, random_text: Make) -> list[EngineRequest]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"n": 3},
        {"best_of": 2},
        {"beam_width": 3, "n": 3},
        {"n": 2, "top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"logprobs": 3, "logit_bias": {5: 2.0, 6: -3.0}, "min_tokens": 3},
    ]
    shared = random_text(20, 99)
    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=tuple(shared[: rng.choice([0, 9, 20])] + random_text(9, number)),
            params=SamplingParams(
                seed=number,
                max_tokens=rng.randint(4, 24),
                ignore_eos=rng.random() < 0.5,
                **rng.choice(kinds),
            ),
            priority=rng.randint(-1, 1),
            arrival=float(number),
        )
        for number in range(16)
    ]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_outputs_equal_those_of_an_engine_with_room_for_all(
    make_model: Make, random_text: Make, engine_of: Make, run_history: Make, seed: int, ahead: bool
) -> None:
    rng = random.Random(seed)
    folder = make_model()
    requests = random_requests(rng, random_text)
    roomy = engine_of(folder, num_kv_blocks=400, block_size=8)
    expected: Outputs = {}
    for request in requests:
        expected |= run_history(roomy, [request], rng)
    tight = engine_of(
        folder,
        rng,
        num_kv_blocks=18,
        num_swap_blocks=(10, 30, 4)[seed],
        block_size=8,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        preemption_mode=("swap", "auto", "swap")[seed],
        async_scheduling=ahead,
    )
    assert run_history(tight, requests, rng) == expected
    stats = tight.stats()
    assert stats.num_steps > 60
    assert stats.num_swaps > 3
    assert stats.num_preemptions > stats.num_swaps
    assert stats.blocks_used == stats.swap_blocks_used == 0


@pytest.mark.parametrize(("size", "ahead"), [(2, False), (4, True)])
def test_a_model_that_is_divided_among_processes_gives_the_same(
    make_model: Make, random_text: Make, engine_of: Make, run_history: Make, size: int, ahead: bool
) -> None:
    rng = random.Random(5)
    folder = make_model()
    requests = random_requests(rng, random_text)[:8]
    expected: Outputs = {}
    roomy = engine_of(folder, num_kv_blocks=400, block_size=8)
    for request in requests:
        expected |= run_history(roomy, [request], rng)
    divided = engine_of(
        folder,
        rng,
        tensor_parallel_size=size,
        num_kv_blocks=18,
        num_swap_blocks=20,
        block_size=8,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        preemption_mode="swap",
        async_scheduling=ahead,
    )
    assert run_history(divided, requests, rng) == expected
    assert divided.stats().num_swaps > 0
