"""Moves of KV blocks: between device and host memory, and copies on the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Final

import torch
from torch import Tensor

from inferq.worker.engine.scheduling.plan import BlockCopy, StepPlan

#: Bytes gathered at once: bounds the memory of a batch of copies.
_COPY_BYTES: Final = 64 * 2**20
#: Blocks moved to measure the speed.
_MEASURED_BLOCKS: Final = 32


class BlockMover:
    """Performs a plan's moves between device blocks and host blocks.

    Both are [blocks, layers, 2, block_size, kv_heads, head_dim]; a block is contiguous, so that all
    layers move at once. On CUDA the host's are pinned, and swaps run on a stream of their own.
    """

    def __init__(self, device_blocks: Tensor, host_blocks: Tensor) -> None:
        self._device_blocks = device_blocks
        self._host_blocks = host_blocks
        block_bytes = device_blocks[0].numel() * device_blocks.element_size()
        self._blocks_at_once = max(1, _COPY_BYTES // block_bytes)
        self._stream = None
        if device_blocks.device.type == "cuda":
            self._stream = torch.cuda.Stream(device_blocks.device)  # type: ignore[no-untyped-call]

    def start(self, plan: StepPlan) -> None:
        """Begin the swaps; the device's blocks must not be used before `finish`."""
        for moves, source, target in (
            (plan.swap_out, self._device_blocks, self._host_blocks),
            (plan.swap_in, self._host_blocks, self._device_blocks),
        ):
            if moves:
                self._swap(moves, source, target)

    def finish(self, plan: StepPlan) -> None:
        """Let all later work see the swaps, and perform the plan's copies on the device."""
        if self._stream is not None and (plan.swap_out or plan.swap_in):
            torch.cuda.current_stream(self._device_blocks.device).wait_stream(self._stream)
        if plan.block_copies and self._stream is not None:
            # Imported here: the CPU does without Triton.
            from inferq.kernels.triton_block_copy import copy_blocks

            copy_blocks(self._device_blocks, plan.block_copies)
        elif plan.block_copies:
            self._gather(plan.block_copies, self._device_blocks, self._device_blocks)

    def bytes_per_s(self) -> float:
        """Measure the swap rate, one way: the mean of out and in. Overwrites the first blocks."""
        count = min(_MEASURED_BLOCKS, len(self._device_blocks), len(self._host_blocks))
        moves = [BlockCopy(index, count - 1 - index) for index in range(count)]
        for plan in (StepPlan([], swap_out=moves), StepPlan([], swap_in=moves)):
            self._run(plan)  # pages are first touched
        start = time.perf_counter()
        for plan in (StepPlan([], swap_out=moves), StepPlan([], swap_in=moves)):
            self._run(plan)
        elapsed = time.perf_counter() - start
        moved = 2 * self._device_blocks[:count].numel() * self._device_blocks.element_size()
        return moved / max(elapsed, 1e-9)

    def _run(self, plan: StepPlan) -> None:
        self.start(plan)
        self.finish(plan)
        if self._stream is not None:
            self._stream.synchronize()

    def _swap(self, moves: SequenceOf[BlockCopy], source: Tensor, target: Tensor) -> None:
        if self._stream is None:
            self._gather(moves, source, target)
            return
        # The blocks may still be read or written by the step before.
        self._stream.wait_stream(torch.cuda.current_stream(self._device_blocks.device))
        with torch.cuda.stream(self._stream):
            # Runs of blocks go by DMA, from or to where they lie: gathering them in host memory
            # would cost a second copy, at the speed of one core.
            for first, other, count in _runs(moves):
                target[other : other + count].copy_(
                    source[first : first + count], non_blocking=True
                )

    def _gather(self, moves: SequenceOf[BlockCopy], source: Tensor, target: Tensor) -> None:
        for first in range(0, len(moves), self._blocks_at_once):
            part = moves[first : first + self._blocks_at_once]
            index = torch.tensor(part, dtype=torch.int64).T.to(source.device)
            target.index_copy_(0, index[1], source.index_select(0, index[0]))


def _runs(moves: SequenceOf[BlockCopy]) -> Iterator[tuple[int, int, int]]:
    """Join moves of neighbouring blocks: yields source, target and number of blocks."""
    first, other, count = 0, 0, 0
    for source, target in moves:
        if count and (source, target) == (first + count, other + count):
            count += 1
            continue
        if count:
            yield first, other, count
        first, other, count = source, target, 1
    if count:
        yield first, other, count
