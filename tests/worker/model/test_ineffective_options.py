"""Options that change nothing are named at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.loading.ineffective_options import ineffective_options


@pytest.mark.parametrize(
    ("options", "device", "named"),
    [
        ({}, "cpu", []),
        ({"enforce_eager": True}, "cpu", []),
        ({"enforce_eager": True}, "cuda", []),
        ({"enforce_eager": True, "tensor_parallel_size": 2}, "cuda", ["enforce_eager"]),
        ({"gpu_memory_utilization": 0.5}, "cpu", ["gpu_memory_utilization"]),
        ({"gpu_memory_utilization": 0.5}, "cuda", []),
        (
            {"gpu_memory_utilization": 0.5, "kv_cache_memory": 2**30},
            "cuda",
            ["gpu_memory_utilization"],
        ),
        (
            {"num_kv_blocks": 9, "kv_cache_memory": 2**30, "gpu_memory_utilization": 0.5},
            "cuda",
            ["gpu_memory_utilization", "kv_cache_memory"],
        ),
        ({"preemption_mode": "swap"}, "cpu", ["preemption_mode"]),
        ({"swap_space": 1.0, "num_swap_blocks": 4}, "cpu", ["swap_space"]),
        ({"num_swap_blocks": 4, "preemption_mode": "swap"}, "cpu", []),
        ({"kv_cache_memory": 2**30}, "cpu", []),
    ],
    ids=str,
)
def test_each_option_without_effect_is_named(
    options: dict[str, Any], device: str, named: list[str]
) -> None:
    config = EngineConfig(model="m", **options)
    found = ineffective_options(config, torch.device(device), options.get("num_swap_blocks", 0))
    assert [sentence.split()[0] for sentence in found] == named
