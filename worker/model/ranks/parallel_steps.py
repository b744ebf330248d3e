"""What rank 0 sends the other ranks: commands as int64 numbers, by a pipe; see `Command`.

The tensors of a step follow a command as one broadcast between the devices: rank 0 itself may not
know yet, on the host, which tokens they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np
import torch
from torch import Tensor

from inferq.kernels.attention import AttentionBatch
from inferq.worker.engine.scheduling.plan import BlockCopy, StepPlan
from inferq.worker.model.architecture.causal_model import StepTensors


class Command(IntEnum):
    """The first number of a command; what follows it stands behind."""

    #: Find the other ranks; nothing follows.
    CONNECT = 0
    #: Begin, and end, the measuring of memory; the second is answered with budget and free bytes.
    MEASURE = 1
    MEASURED = 2
    #: Number of KV blocks and of host blocks; answered.
    ALLOCATE = 3
    #: Numbers of swaps out, swaps in and copies, then source and target of each.
    MOVE = 4
    #: `StepSizes.numbers`; the step's tensors follow as a broadcast.
    STEP = 5
    #: Number of hidden rows, which follow as a broadcast.
    LOGITS = 6


def encode(command: Command, numbers: Sequence[int] = ()) -> bytes:
    """Return a command as bytes."""
    return np.array((command, *numbers), dtype=np.int64).tobytes()


def decode(data: bytes) -> tuple[Command, list[int]]:
    """Return what `encode` was given."""
    command, *numbers = np.frombuffer(data, dtype=np.int64).tolist()
    return Command(command), numbers


def encode_moves(plan: StepPlan) -> bytes:
    """Return the command for a plan's block moves."""
    moves = (plan.swap_out, plan.swap_in, plan.block_copies)
    pairs = [number for part in moves for move in part for number in move]
    return encode(Command.MOVE, [*map(len, moves), *pairs])


def decode_moves(numbers: Sequence[int]) -> StepPlan:
    """Return a plan of nothing but the moves."""
    pairs = iter(numbers[3:])
    moves = [[BlockCopy(next(pairs), next(pairs)) for _ in range(n)] for n in numbers[:3]]
    return StepPlan([], swap_out=moves[0], swap_in=moves[1], block_copies=moves[2])


def pack(step: StepTensors) -> Tensor:
    """Return a step's tensors as one int64 tensor; `StepSizes.receive` takes it apart."""
    batch = step.batch
    parts = (
        step.token_ids,
        step.positions,
        batch.slot_mapping,
        step.rows,
        batch.query_starts,
        batch.seq_lens,
        batch.block_tables.flatten(),
        *(() if step.adapters is None else (step.adapters,)),
    )
    return torch.cat([part.long() for part in parts])


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What the host knows of a step's tensors: enough to take them apart again."""

    num_tokens: int
    num_rows: int
    max_blocks: int
    num_decodes: int
    #: As many as tokens; 0 where none has one.
    num_adapters: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    @classmethod
    def of(cls, step: StepTensors) -> Self:
        """Return a step's sizes."""
        batch = step.batch
        return cls(
            num_tokens=step.token_ids.numel(),
            num_rows=step.rows.numel(),
            max_blocks=batch.block_tables.shape[1],
            num_decodes=batch.num_decodes,
            num_adapters=0 if step.adapters is None else step.adapters.numel(),
            query_lens=batch.query_lens,
            context_lens=batch.context_lens,
        )

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Self:
        """Return the sizes whose `numbers` these are."""
        size = (len(numbers) - 5) // 2
        tokens, rows, blocks, decodes, adapters = numbers[:5]
        lens = tuple(numbers[5:])
        return cls(tokens, rows, blocks, decodes, adapters, lens[:size], lens[size:])

    @property
    def numbers(self) -> list[int]:
        """Give all of them."""
        fixed = (self.num_tokens, self.num_rows, self.max_blocks, self.num_decodes)
        return [*fixed, self.num_adapters, *self.query_lens, *self.context_lens]

    def receive(
        self, fill: Callable[[Tensor], None], block_size: int, device: torch.device
    ) -> StepTensors:
        """Return the step's tensors, having `fill` write the packed ones of rank 0."""
        sequences = len(self.query_lens)
        counts = [self.num_tokens] * 3 + [self.num_rows, sequences + 1, sequences]
        counts += [sequences * self.max_blocks, self.num_adapters]
        packed = torch.empty(sum(counts), dtype=torch.int64, device=device)
        fill(packed)
        parts = torch.split(packed, counts)
        token_ids, positions, slots, rows, starts, lens, tables, adapters = parts
        batch = AttentionBatch(
            query_starts=starts.int(),
            seq_lens=lens.int(),
            block_tables=tables.int().view(sequences, self.max_blocks),
            slot_mapping=slots,
            num_decodes=self.num_decodes,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            block_size=block_size,
        )
        return StepTensors(
            token_ids, positions, batch, rows, adapters if self.num_adapters else None
        )
