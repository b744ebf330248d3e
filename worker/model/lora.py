"""Low-rank adapters (LoRA) beside a matrix product: several at once, each row with its own.

An adapter adds x · Aᵀ · Bᵀ to x · Wᵀ. All adapters' A stand below each other and all B side by
side; between the two products each row keeps the columns of its adapter, the others become 0. So
the work and all shapes are the same whichever adapters the rows of a step have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferq.kernels.huge_pages import HugePages
from inferq.kernels.matmul import PlainWeight, Weight, pack_float


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """What the rows of a step keep between the two products."""

    is_other: Tensor
    """bool [T, 1, ranks]: columns that are not of the row's adapter."""

    def take(self, rows: Tensor) -> AdapterRows:
        """Return the same for some of the rows."""
        return AdapterRows(self.is_other[rows])


class AdapterColumns:
    """The columns of all adapters, one adapter's after the other's; they are numbered from 1."""

    def __init__(self, ranks: Sequence[int], device: torch.device) -> None:
        numbers = torch.arange(1, len(ranks) + 1)
        self._owners = numbers.repeat_interleave(torch.tensor(ranks)).to(device)

    def rows(self, adapters: Tensor) -> AdapterRows:
        """Return what rows keep, given each one's adapter [T], int64; 0 is none."""
        return AdapterRows((adapters[:, None] != self._owners)[:, None, :])


class LoraProduct:
    """All adapters of one matrix product, some of whose fused parts they change.

    `down` is [parts · ranks, inputs], `up` [outputs, parts · ranks] with the scaling in it: 0 where
    a part's columns meet another part's outputs.
    """

    def __init__(self, down: Tensor, up: Tensor, *, parts: int, memory: HugePages) -> None:
        self._parts = parts
        self._down: Weight = pack_float(down, memory)
        self._up: Weight = pack_float(up, memory)

    def add(self, out: Tensor, x: Tensor, rows: AdapterRows) -> Tensor:
        """Add to out [T, outputs], in place, what the rows' adapters make of x [T, inputs]."""
        inner = self._down.multiply(x, None)
        parts = inner.view(inner.shape[0], self._parts, rows.is_other.shape[2])
        parts.masked_fill_(rows.is_other, 0.0)
        if isinstance(self._up, PlainWeight):
            return out.addmm_(inner, self._up.weight.T)
        return out.add_(self._up.multiply(inner, None))
