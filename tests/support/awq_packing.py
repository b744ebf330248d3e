"""Packs float weights as AutoAWQ does ("GEMM" format), for tests of what reads them."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Of eight neighbouring columns, the one that each four bits of a word hold, from the lowest on.
COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class PackedAwq:
    """A linear layer's tensors, as a checkpoint names them."""

    qweight: Tensor  # int32 [K, N / 8]
    qzeros: Tensor  # int32 [K / group, N / 8]
    scales: Tensor  # [K / group, N]


def pack_awq(weight: Tensor, group: int, scale_dtype: torch.dtype = torch.float16) -> PackedAwq:
    """Quantize a weight [N, K], as torch's linear layers hold it; a group of -1 is all of K."""
    outputs, inputs = weight.shape
    grouped = weight.float().t().reshape(-1, inputs if group == -1 else group, outputs)
    low, high = grouped.amin(dim=1), grouped.amax(dim=1)  # [K / group, N]
    scales = ((high - low).clamp(min=1e-5) / 15).to(scale_dtype)
    zeros = (-(low / scales.float()).round()).clamp(0, 15)
    values = (grouped / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    return pack_awq_values(values.reshape(inputs, outputs), zeros, scales)


def pack_awq_values(values: Tensor, zeros: Tensor, scales: Tensor) -> PackedAwq:
    """Pack values [K, N] and zeros [K / group, N], whole numbers from 0 to 15."""
    return PackedAwq(_pack(values), _pack(zeros), scales.contiguous())


def _pack(values: Tensor) -> Tensor:
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(COLUMNS):
        words |= values[:, column::8].long() << (4 * place)
    return words.to(torch.int32)  # the low 32 bits
