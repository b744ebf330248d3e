"""Histories in which many sequences share a prefix: reading it once for all changes no token."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from inferq.kernels.cpu_attention_native import NativeAttention, NativePlan
from inferq.kernels.native.library import load_native
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.sequence import EngineRequest, Sequence
from inferq.worker.engine.scheduling.preemption import ForcedPreemption
from inferq.worker.model.running.runner import load_runner

Make = Callable[..., Any]

PREFIX = 76


class Disturbance:
    """Preempts a random running sequence before every few steps, by either means."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, running: tuple[Sequence, ...]) -> Iterator[ForcedPreemption]:
        if running and self._rng.random() < 0.15:
            yield ForcedPreemption(self._rng.choice(running), by_swap=self._rng.random() < 0.5)


def engine_of(folder: Path, rng: random.Random, num_kv_blocks: int) -> Engine:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        max_model_len=128,
        max_num_seqs=24,
        block_size=8,
        num_kv_blocks=num_kv_blocks,
    )
    runner = load_runner(config)
    return Engine(
        config,
        runner,
        num_blocks=runner.num_blocks,
        max_model_len=runner.max_model_len,
        eos_token_ids=runner.eos_token_ids,
        vocab_size=runner.vocab_size,
        num_swap_blocks=runner.num_swap_blocks,
        preemption_hook=Disturbance(rng),
    )


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


def run(engine: Engine, waiting: list[EngineRequest], rng: random.Random) -> dict[Any, list[int]]:
    outputs: dict[Any, list[int]] = {}
    while waiting or engine.has_work():
        if waiting and (rng.random() < 0.7 or not engine.has_work()):
            engine.add_request(waiting.pop(0))
        for output in engine.step():
            assert output.error is None
            outputs.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        engine.check_integrity()
    return outputs


@pytest.mark.parametrize("num_kv_blocks", [200, 45])
def test_shared_blocks_change_no_token(
    make_model: Make, random_text: Make, monkeypatch: pytest.MonkeyPatch, num_kv_blocks: int
) -> None:
    """Forks, copies on write, preemption by both means, evicted prefixes; with little memory."""
    if load_native() is None:
        pytest.skip("no native kernels here")
    folder = make_model("Llama")
    find, groups = NativeAttention.shared_prefixes, 0

    def counted(self: NativeAttention, plan: NativePlan, group: int) -> Tensor | None:
        nonlocal groups
        found = find(self, plan, group)
        groups += found is not None
        return found

    monkeypatch.setattr(NativeAttention, "shared_prefixes", counted)
    rng = random.Random(5)
    shared = run(engine_of(folder, rng, num_kv_blocks), requests(random_text), rng)
    assert groups > 5
    monkeypatch.setattr(NativeAttention, "shared_prefixes", lambda *_: None)
    rng = random.Random(6)
    assert shared == run(engine_of(folder, rng, 200), requests(random_text), rng)
