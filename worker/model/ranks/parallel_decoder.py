"""Rank 0's view of a divided model: it looks whole, and every call is made on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from inferq.worker.engine.scheduling.plan import StepPlan
from inferq.worker.model.architecture.causal_model import ModelDescription, StepTensors
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.architecture.transformer import Decoder
from inferq.worker.model.ranks.parallel import Share
from inferq.worker.model.ranks.parallel_group import RankGroup
from inferq.worker.model.ranks.parallel_steps import (
    Command,
    StepSizes,
    encode,
    encode_moves,
    pack,
)
from inferq.worker.model.ranks.rank_processes import RankProcesses
from inferq.worker.model.running.block_moves import BlockMover

_T = TypeVar("_T")


class ParallelDecoder:
    """A `CausalModel` over the ranks' decoders, of which `decoder` is this process's.

    Raises `RankLost` once a rank is gone, or a call has failed: the ranks may be anywhere then.
    """

    def __init__(self, decoder: Decoder, group: RankGroup, ranks: RankProcesses) -> None:
        self._decoder = decoder
        self._group = group
        self._ranks = ranks
        self.max_positions = decoder.max_positions

    @property
    def config(self) -> ModelConfig:
        """The whole model's sizes."""
        return self._decoder.config

    @property
    def share(self) -> ModelConfig:
        """The sizes of this process's layers; those of all ranks are the same."""
        return Share(self._decoder.config, self._group.rank, self._group.size).config

    @property
    def description(self) -> ModelDescription:
        """How the share of rank 0 is computed."""
        return self._decoder.description

    @property
    def device(self) -> torch.device:
        """Where rank 0 computes."""
        return self._decoder.device

    def hidden(self, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """See `Decoder.hidden`; the other ranks write to caches of their own."""
        with self._ranks.together():
            self._ranks.send(encode(Command.STEP, StepSizes.of(step).numbers))
            self._group.broadcast(pack(step))
            return self._decoder.hidden(step, kv_cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        with self._ranks.together():
            self._ranks.send(encode(Command.LOGITS, [hidden.shape[0]]))
            hidden = hidden.contiguous()
            self._group.broadcast(hidden)
            return self._decoder.logits(hidden)

    def check(self) -> None:
        """Raise `RankLost` if what the device has computed may be wrong: a rank is gone."""
        self._ranks.check()

    def measured(self, measure: Callable[[], _T]) -> tuple[_T, list[list[int]]]:
        """Return what `measure` says of a full-size step, and what the other ranks answer."""
        with self._ranks.together():
            self._ranks.send(encode(Command.MEASURE))
            own = measure()
            self._ranks.send(encode(Command.MEASURED))
            return own, self._ranks.answers()

    def allocate(self, num_blocks: int, num_swap_blocks: int) -> None:
        """Have every other rank allocate its KV cache and host blocks."""
        with self._ranks.together():
            self._ranks.send(encode(Command.ALLOCATE, [num_blocks, num_swap_blocks]))
            self._ranks.answers()

    def stop(self, reason: str) -> None:
        """End the other ranks."""
        self._ranks.stop(reason)

    def mover(self, device_blocks: Tensor, host_blocks: Tensor) -> BlockMover:
        """Return a mover of every rank's blocks."""
        return _RanksMover(self._ranks, device_blocks, host_blocks)


class _RanksMover(BlockMover):
    """Moves the blocks of all ranks; what it is given are those of rank 0."""

    def __init__(self, ranks: RankProcesses, device_blocks: Tensor, host_blocks: Tensor) -> None:
        super().__init__(device_blocks, host_blocks)
        self._ranks = ranks

    def start(self, plan: StepPlan) -> None:
        """See `BlockMover.start`; the other ranks finish the moves before their next command."""
        if not (plan.swap_out or plan.swap_in or plan.block_copies):
            return
        with self._ranks.together():
            self._ranks.send(encode_moves(plan))
            super().start(plan)
