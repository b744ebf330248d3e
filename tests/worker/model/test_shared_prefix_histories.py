"""Histories in which many sequences share a prefix: reading it once for all changes no token."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from inferq.kernels.cpu_attention_native import NativeAttention, NativePlan
from inferq.kernels.native.library import load_native
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.sequence import EngineRequest

Make = Callable[..., Any]

PREFIX = 76


@pytest.fixture
def engine_of(engine_over: Make) -> Make:
    def make(folder: Path, rng: random.Random, num_kv_blocks: int) -> Engine:
        config = EngineConfig(
            model=str(folder),
            device="cpu",
            max_model_len=128,
            max_num_seqs=24,
            block_size=8,
            num_kv_blocks=num_kv_blocks,
        )
        engine: Engine = engine_over(config, rng=rng)
        return engine

    return make


def requests(random_text: Make) -> list[EngineRequest]:
    """Requests with the same beginning, half of them with several outputs that fork."""
    shared = random_text(PREFIX, 99)
    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=tuple(shared + random_text(number % 5, number)),
            params=SamplingParams(
                seed=number, max_tokens=6 + number % 9, ignore_eos=True, n=1 + 3 * (number % 2)
            ),
            arrival=float(number),
        )
        for number in range(14)
    ]


@pytest.mark.parametrize("num_kv_blocks", [200, 45])
def test_shared_blocks_change_no_token(
    make_model: Make,
    random_text: Make,
    engine_of: Make,
    run_history: Make,
    monkeypatch: pytest.MonkeyPatch,
    num_kv_blocks: int,
) -> None:
    """Forks, copies on write, preemption by both means, evicted prefixes; with little memory."""
    if load_native() is None:
        pytest.skip("no native kernels here")
    folder = make_model("Llama")
    find, groups = NativeAttention.shared_prefixes, 0

    def counted(self: NativeAttention, plan: NativePlan, group: int) -> Tensor | None:
        nonlocal groups
        found = find(self, plan, group)
        groups += found is not None and bool(found[1].any())
        return found

    monkeypatch.setattr(NativeAttention, "shared_prefixes", counted)
    rng = random.Random(5)
    engine = engine_of(folder, rng, num_kv_blocks)
    shared = run_history(engine, requests(random_text), rng, haste=0.7)
    assert groups > 5
    monkeypatch.setattr(NativeAttention, "shared_prefixes", lambda *_: None)
    rng = random.Random(6)
    engine = engine_of(folder, rng, 200)
    assert shared == run_history(engine, requests(random_text), rng, haste=0.7)
