"""How much host memory swapped blocks get, and that blocks arrive where they should."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from inferq.protocol.errors import ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.scheduling.plan import BlockCopy, StepPlan
from inferq.worker.model.running import block_moves
from inferq.worker.model.running.block_moves import BlockMover
from inferq.worker.model.running.kv_cache import KVCacheShape, swap_pool_size
from inferq.worker.model.running.runner import load_runner

SHAPE = KVCacheShape(layers=3, block_size=4, kv_heads=2, head_dim=8, dtype=torch.float32)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def numbered(num_blocks: int, first: int) -> torch.Tensor:
    blocks = SHAPE.allocate(num_blocks, CPU)
    blocks += torch.arange(first, first + num_blocks)[:, None, None, None, None, None]
    return blocks


def numbers(blocks: torch.Tensor) -> list[int]:
    assert bool((blocks == blocks[:, :1, :1, :1, :1, :1]).all()), "a block moved in part"
    return [int(number) for number in blocks[:, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("copy_bytes", [1, 4 * SHAPE.block_bytes, 2**26])
def test_blocks_move_whole_and_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, copy_bytes: int
) -> None:
    monkeypatch.setattr(block_moves, "_COPY_BYTES", copy_bytes)
    draw = random.Random(0)
    device, host = numbered(20, 100), numbered(12, 500)
    mover = BlockMover(device, host)
    expected_device, expected_host = numbers(device), numbers(host)
    for turn in range(30):
        count = draw.randint(0, 9)
        pairs = [
            BlockCopy(*pair)
            for pair in zip(
                draw.sample(range(12), count), draw.sample(range(12), count), strict=True
            )
        ]
        # Copies read blocks that no copy writes, and write what swaps may just have filled.
        copies = [BlockCopy(source, source + 6) for source in draw.sample(range(12, 14), 2)]
        plan = StepPlan([], **{("swap_out", "swap_in")[turn % 2]: pairs}, block_copies=copies)
        mover.start(plan)
        mover.finish(plan)
        source, target = expected_device, expected_host
        if turn % 2:
            source, target = target, source
        values = [source[pair.source] for pair in pairs]
        for pair, value in zip(pairs, values, strict=True):
            target[pair.target] = value
        for copy in copies:
            expected_device[copy.target] = expected_device[copy.source]
        assert (numbers(device), numbers(host)) == (expected_device, expected_host)


def test_neighbouring_blocks_move_together() -> None:
    moves = [BlockCopy(*pair) for pair in ((3, 7), (4, 8), (5, 9), (6, 2), (8, 3), (9, 4), (1, 5))]
    assert list(block_moves._runs(moves)) == [(3, 7, 3), (6, 2, 1), (8, 3, 2), (1, 5, 1)]
    assert list(block_moves._runs([])) == []


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({}, CPU, 0),
        ({}, GPU, 4 * 2**30 // SHAPE.block_bytes),
        ({"swap_space": 0.0}, GPU, 0),
        ({"swap_space": 0.01}, CPU, int(0.01 * 2**30) // SHAPE.block_bytes),
        ({"num_swap_blocks": 7, "swap_space": 0.5}, CPU, 7),
        ({"num_swap_blocks": 7, "preemption_mode": "recompute"}, CPU, 0),
    ],
    ids=str,
)
def test_swap_space_follows_the_options_and_the_device(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], device: torch.device, expected: int
) -> None:
    monkeypatch.setattr("inferq.worker.model.running.kv_cache.available_memory", lambda: 2**36)
    assert swap_pool_size(EngineConfig(model="m", **options), SHAPE, device) == expected


@pytest.mark.parametrize(
    ("options", "field"),
    [({"swap_space": 3.0}, "swap_space"), ({"num_swap_blocks": 10**6}, "num_swap_blocks")],
)
def test_more_swap_space_than_the_host_has_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], field: str
) -> None:
    monkeypatch.setattr("inferq.worker.model.running.kv_cache.available_memory", lambda: 2**30)
    with pytest.raises(ModelError, match=rf"{field}: .* but 1\.0 GiB are free") as caught:
        swap_pool_size(EngineConfig(model="m", **options), SHAPE, CPU)
    assert caught.value.field == field


def test_the_start_tells_of_swap_space_and_of_what_has_no_effect(
    make_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder: Path = make_model()
    options: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 20}
    config = EngineConfig(model=str(folder), num_swap_blocks=10, kv_cache_memory=2**20, **options)
    with caplog.at_level(logging.INFO):
        assert load_runner(config).num_swap_blocks == 10
    assert "10 blocks of 16 tokens (120.0 KiB) of host memory" in caplog.text
    assert any("kv_cache_memory has no effect" in message for message in caplog.messages)
