"""Section: blocks moved between the GPU and pinned host memory, against one large copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import cached_property, partial

import torch
from torch import Tensor

from gpu.records import Quantity, Record
from gpu.section import Case, Settings, each
from inferq.worker.engine.scheduling.plan import BlockCopy, StepPlan
from inferq.worker.model.running.block_moves import BlockMover

_ROUNDS = 5


class _Pools:
    """Blocks of a Llama-3-8B cache (2 MiB each) on the device and, pinned, on the host."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._shape = (2, 2, 4, 2, 8) if settings.smoke else (32, 2, 16, 8, 128)
        self.count = 8 if settings.smoke else 512

    @cached_property
    def device_blocks(self) -> Tensor:
        return torch.randn(
            2 * self.count, *self._shape, dtype=self.settings.dtype, device=self.settings.device
        )

    @cached_property
    def host_blocks(self) -> Tensor:
        pinned = self.settings.device.type == "cuda"
        return torch.empty(self.count, *self._shape, dtype=self.settings.dtype, pin_memory=pinned)

    @cached_property
    def mover(self) -> BlockMover:
        return BlockMover(self.device_blocks, self.host_blocks)


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases: both ways, in runs and scattered."""
    pools = _Pools(settings)
    for direction in ("out", "in"):
        for order in ("runs of 64", "scattered"):
            name = f"swap {direction}, {order}"
            yield each(name, partial(_measure, name, direction, order, pools))


def _measure(name: str, direction: str, order: str, pools: _Pools) -> Record:
    count = pools.count
    if order == "scattered":
        generator = torch.Generator().manual_seed(0)
        blocks = torch.randperm(2 * count, generator=generator)[:count].tolist()
    else:
        run = 2 if pools.settings.smoke else 64
        blocks = [2 * (i - i % run) + i % run for i in range(count)]
    pairs = list(enumerate(blocks))
    if direction == "out":
        plan = StepPlan([], swap_out=[BlockCopy(block, place) for place, block in pairs])
    else:
        plan = StepPlan([], swap_in=[BlockCopy(place, block) for place, block in pairs])

    def move() -> None:
        pools.mover.start(plan)
        pools.mover.finish(plan)

    host, device = pools.host_blocks, pools.device_blocks[:count]
    source, target = (device, host) if direction == "out" else (host, device)
    size = source.nbytes
    seconds = _seconds(move, pools.settings)
    best = _seconds(lambda: target.copy_(source, non_blocking=True), pools.settings)
    return Record(
        name,
        {
            "time": Quantity(seconds * 1e3, "ms"),
            "blocks": Quantity(count / seconds, "blocks/s"),
            "bandwidth": Quantity(size / seconds / 1e9, "GB/s"),
            "one_copy": Quantity(size / best / 1e9, "GB/s"),
            "share": Quantity(best / seconds, "of one pinned copy"),
        },
    )


def _seconds(move: Callable[[], object], settings: Settings) -> float:
    """Return the median host time of a move and the wait for it, after one that warms up."""
    times = []
    for _ in range(_ROUNDS + 1):
        _synchronize(settings)
        start = time.perf_counter()
        move()
        _synchronize(settings)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _synchronize(settings: Settings) -> None:
    if settings.device.type == "cuda":
        torch.cuda.synchronize(settings.device)
