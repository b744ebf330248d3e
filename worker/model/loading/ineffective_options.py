"""Which of the options given have no effect on this device, or beside the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch

from inferq.worker.engine.config import EngineConfig


def ineffective_options(
    config: EngineConfig, device: torch.device, num_swap_blocks: int
) -> Iterator[str]:
    """Yield a sentence for each option that was given and changes nothing."""
    given = {f.name for f in fields(config) if getattr(config, f.name) != f.default}
    if "enforce_eager" in given and config.tensor_parallel_size > 1:
        yield "enforce_eager has no effect: the steps of several ranks are not captured anyway"
    if "num_kv_blocks" in given:
        for name in sorted(given & {"kv_cache_memory", "gpu_memory_utilization"}):
            yield f"{name} has no effect: num_kv_blocks sizes the KV cache"
    elif "gpu_memory_utilization" in given and device.type == "cpu":
        yield "gpu_memory_utilization has no effect on the CPU: set kv_cache_memory"
    elif given >= {"gpu_memory_utilization", "kv_cache_memory"}:
        yield "gpu_memory_utilization has no effect: kv_cache_memory sizes the KV cache"
    if given >= {"swap_space", "num_swap_blocks"}:
        yield "swap_space has no effect: num_swap_blocks sizes the swap space"
    if config.preemption_mode == "swap" and num_swap_blocks == 0:
        yield "preemption_mode swap has no effect without swap_space: sequences are recomputed"
