"""Low-rank adapters (LoRA) beside a matrix product: several at once, each row with its own.

An adapter adds x · Aᵀ · Bᵀ to x · Wᵀ. All adapters' A stand below each other and all B side by
side. On the CPU each row is multiplied with its own adapter's; on a GPU with all of them, and
between the two products a row keeps the columns of its adapter, while the others become 0: the work
and all shapes are the same then, whichever adapters the rows have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferq.kernels.huge_pages import HugePages
from inferq.kernels.lora import pack_lora
from inferq.kernels.matmul import PlainWeight, Weight, pack_float


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapters of a step's rows."""

    numbers: Tensor
    """int64 [T]: 0 is none."""
    is_other: Tensor
    """bool [T, 1, ranks]: columns that are not of the row's adapter."""

    def take(self, rows: Tensor) -> AdapterRows:
        """Return the same for some of the rows."""
        return AdapterRows(self.numbers[rows], self.is_other[rows])


class AdapterColumns:
    """The columns of all adapters, one adapter's after the other's; they are numbered from 1."""

    def __init__(self, ranks: Sequence[int], device: torch.device) -> None:
        self.ranks = tuple(ranks)
        numbers = torch.arange(1, len(ranks) + 1)
        self._owners = numbers.repeat_interleave(torch.tensor(ranks)).to(device)

    def rows(self, adapters: Tensor) -> AdapterRows:
        """Return what the products take, given each row's adapter [T], int64."""
        return AdapterRows(adapters, (adapters[:, None] != self._owners)[:, None, :])


class LoraProduct:
    """All adapters of one matrix product, some of whose fused parts they change.

    `down` is [parts · ranks, inputs]; `ups` has for each part its first output, and B
    [outputs of the part, ranks] with the scaling in it.
    """

    def __init__(
        self,
        down: Tensor,
        ups: Sequence[tuple[int, Tensor]],
        *,
        outputs: int,
        columns: AdapterColumns,
        memory: HugePages,
    ) -> None:
        self._native = pack_lora(down, ups, columns.ranks)
        self._stacked: _Stacked | None = None
        if self._native is None:
            self._stacked = _Stacked(down, ups, outputs, memory)

    def add(self, out: Tensor, x: Tensor, rows: AdapterRows) -> Tensor:
        """Add to out [T, outputs], in place, what the rows' adapters make of x [T, inputs]."""
        if self._native is not None:
            return self._native.add(out, x, rows.numbers)
        assert self._stacked is not None, "one form is there"
        return self._stacked.add(out, x, rows.is_other)


class _Stacked:
    """B is one matrix [outputs, parts · ranks]: 0 where a part's columns meet others' outputs."""

    def __init__(
        self, down: Tensor, ups: Sequence[tuple[int, Tensor]], outputs: int, memory: HugePages
    ) -> None:
        self._parts = len(ups)
        ranks = len(down) // len(ups)
        up = down.new_zeros(outputs, len(down))
        for part, (first, weight) in enumerate(ups):
            up[first : first + len(weight), part * ranks : (part + 1) * ranks] = weight
        self._down: Weight = pack_float(down, memory)
        self._up: Weight = pack_float(up, memory)

    def add(self, out: Tensor, x: Tensor, is_other: Tensor) -> Tensor:
        inner = self._down.multiply(x, None)
        parts = inner.view(inner.shape[0], self._parts, is_other.shape[2])
        parts.masked_fill_(is_other, 0.0)
        if isinstance(self._up, PlainWeight):
            return out.addmm_(inner, self._up.weight.T)
        return out.add_(self._up.multiply(inner, None))
