"""What a GPU has left for the KV cache, by the figures of a GPU that is made up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.sizing.profiling import MemoryMeter

GIB = 2**30
GPU = torch.device("cuda", 0)


@dataclass
class GpuFigures:
    """Stands in for what CUDA and torch's allocator say; in bytes."""

    total: int
    others: int
    weights: int
    peak: int = 0
    kept_for_reuse: int = 0

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return self.total - self.others - self.weights - self.kept_for_reuse, self.total

    def memory_allocated(self, _: torch.device) -> int:
        return self.weights

    def max_memory_allocated(self, _: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, _: torch.device) -> None:
        self.peak = self.weights

    def empty_cache(self) -> None:
        self.kept_for_reuse = 0

    def step(self, activations: int) -> None:
        """Run a step; the allocator keeps its memory."""
        self.peak = self.weights + activations
        self.kept_for_reuse = activations

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("mem_get_info", "memory_allocated", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset_peak_memory_stats)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)


@pytest.mark.parametrize(
    ("others", "share", "expected"),
    [
        (0, 0.9, 72 - 16 - 2 - 1),
        (20 * GIB, 0.9, 72 - 20 - 16 - 2 - 1),
        (20 * GIB, 0.5, 40 - 20 - 16 - 2 - 1),
        (30 * GIB, 0.5, 0),
    ],
    ids=["alone", "shared", "shared, half of it", "shared, nothing is left"],
)
def test_the_cache_gets_what_others_weights_step_and_graphs_leave(
    monkeypatch: pytest.MonkeyPatch, others: int, share: float, expected: int
) -> None:
    figures = GpuFigures(total=80 * GIB, others=others, weights=16 * GIB, peak=50 * GIB)
    figures.install(monkeypatch)
    meter = MemoryMeter(GPU)  # what loading took at its peak does not count
    figures.step(2 * GIB)
    meter.end_step()
    config = EngineConfig(model="m", gpu_memory_utilization=share)
    assert meter.budget(config, graphs=GIB) == expected * GIB


def test_bytes_that_were_asked_for_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    GpuFigures(total=80 * GIB, others=70 * GIB, weights=8 * GIB).install(monkeypatch)
    config = EngineConfig(model="m", kv_cache_memory=3 * GIB)
    assert MemoryMeter(GPU).budget(config, graphs=GIB) == 3 * GIB
