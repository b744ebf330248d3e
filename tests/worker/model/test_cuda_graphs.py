"""Captured decode steps, with a stand-in for the device's graphs: padding and buffers are real."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inferq.kernels.reference import ReferenceAttention
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.model.architecture.transformer import Decoder
from inferq.worker.model.running.cuda_graphs import Captured, UnrecordedGraphs, graph_sizes
from inferq.worker.model.running.runner import DecoderRunner, load_runner

Make = Callable[..., Any]


class StandInGraphs(UnrecordedGraphs):
    """Repeats the work on the memory that it was recorded with, and notes the sizes."""

    def __init__(self) -> None:
        self.replayed: list[int] = []

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        captured = super().capture(work)

        def replay() -> None:
            self.replayed.append(len(captured.output))
            captured.replay()

        return Captured(replay, captured.output)


@pytest.fixture
def runners(
    make_model: Make,
) -> Callable[..., tuple[DecoderRunner, DecoderRunner, StandInGraphs]]:
    """Make a runner without and one with graphs, whose attention reads all from the device."""

    def make(config: EngineConfig) -> tuple[DecoderRunner, DecoderRunner, StandInGraphs]:
        plain = load_runner(config)
        assert isinstance(plain._decoder, Decoder)
        plain._decoder._attention = ReferenceAttention()
        graphs = StandInGraphs()
        kv_cache = plain._kv_cache.clone().fill_(torch.nan)
        runner = DecoderRunner(
            plain._decoder,
            kv_cache,
            torch.zeros(plain.num_swap_blocks, *kv_cache.shape[1:]),
            config,
            folder=plain.folder,
            max_model_len=plain.max_model_len,
            vocab_size=plain.vocab_size,
            launches_ahead=plain.launches_ahead,
            graphs=graphs,
        )
        assert bool(kv_cache.isnan().all()), "capturing wrote to the cache"
        return plain, runner, graphs

    return make


def requests_of(random_text: Make) -> list[EngineRequest]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.9},
        {"n": 2, "min_p": 0.05},
        {"logprobs": 2},
        {"beam_width": 2},
        {"presence_penalty": 0.5},
        {"min_tokens": 4, "logit_bias": {7: 1.0}},
    ]
    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=tuple(random_text(3 + 2 * number, number)),
            params=SamplingParams(seed=number, max_tokens=8 + number % 3, **kind),
            arrival=float(number),
        )
        for number, kind in enumerate(kinds * 2)
    ]


def test_sizes_are_1_2_4_8_and_then_by_8() -> None:
    assert graph_sizes(1) == [1, 8]
    assert graph_sizes(8) == [1, 2, 4, 8]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 24]
    assert graph_sizes(256)[-2:] == [248, 256]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("disturbed", [False, True])
def test_tokens_are_the_same_with_graphs(
    make_model: Make,
    random_text: Make,
    engine_over: Make,
    run_history: Make,
    runners: Callable[..., tuple[DecoderRunner, DecoderRunner, StandInGraphs]],
    ahead: bool,
    disturbed: bool,
) -> None:
    config = EngineConfig(
        model=str(make_model()),
        device="cpu",
        max_model_len=64,
        block_size=4,
        num_kv_blocks=100,
        num_swap_blocks=40,
        max_num_seqs=12,
        max_num_batched_tokens=80,
        async_scheduling=ahead,
    )
    plain, graphed, graphs = runners(config)
    requests = requests_of(random_text)
    expected: dict[Any, Any] = {}
    roomy = engine_over(config, plain)
    for request in requests:
        expected |= run_history(roomy, [request])
    engine = engine_over(config, graphed, random.Random(7) if disturbed else None)
    assert run_history(engine, requests, random.Random(2), haste=0.9) == expected
    assert len(graphs.replayed) > 10
    assert {8, 16} <= set(graphs.replayed)
    if disturbed:
        assert engine.stats().num_preemptions > 3
    assert engine.stats().blocks_used == 0


def test_broken_logits_of_a_replayed_step_end_their_own_request(
    make_model: Make,
    engine_over: Make,
    runners: Callable[..., tuple[DecoderRunner, DecoderRunner, StandInGraphs]],
) -> None:
    config = EngineConfig(
        model=str(make_model()), device="cpu", num_kv_blocks=40, max_num_seqs=4, max_model_len=64
    )
    _, runner, graphs = runners(config)
    engine = engine_over(config, runner)
    for name in ("a", "b"):
        params = SamplingParams(seed=0, max_tokens=8, temperature=0, ignore_eos=True)
        engine.add_request(
            EngineRequest(request_id=name, prompt_token_ids=(5, len(name)), params=params)
        )
    engine.step()
    first, _ = engine.live_sequences()
    runner._kv_cache[first.block_table[0]] = torch.nan
    ended = {o.request_id: o for _ in range(8) for o in engine.step() if o.request_finished}
    assert ended["a"].error is not None
    assert "not finite" in ended["a"].error.message
    assert ended["b"].error is None
    assert 2 in graphs.replayed


def test_a_graph_reads_nothing_that_its_capture_left_behind(
    make_model: Make,
    random_text: Make,
    runners: Callable[..., tuple[DecoderRunner, DecoderRunner, StandInGraphs]],
    loop_of: Make,
) -> None:
    """Longer contexts, other rows and fewer sequences than before, in one size of graph."""
    config = EngineConfig(
        model=str(make_model()), device="cpu", num_kv_blocks=40, max_num_seqs=8, max_model_len=64
    )
    plain, runner, graphs = runners(config)
    results = []
    for each in (plain, runner):
        loop = loop_of(Path(config.model), num_kv_blocks=40)
        loop.runner = each
        sequences = [loop.add(random_text(5 + 6 * n, n), str(n)) for n in range(6)]
        for size in (6, 5, 6, 5, 6):
            loop.step(sequences[:size])
            loop.step(sequences[6 - size :])
        results.append([s.token_ids for s in sequences])
    assert results[0] == results[1]
    assert set(graphs.replayed) == {8}
