"""Packs float weights as GPTQ does, for tests of what reads them.

The layout is AutoGPTQ's: eight inputs of an output in a word, zeros stored less one in the first
version of the format, and each input's group in g_idx.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedGptq:
    """A linear layer's tensors, as a checkpoint names them."""

    qweight: Tensor  # int32 [K / 8, N]
    qzeros: Tensor  # int32 [K / group, N / 8]
    scales: Tensor  # float16 [K / group, N]
    g_idx: Tensor  # int32 [K]


def pack_gptq(weight: Tensor, group: int, *, sym: bool, zero_offset: int = 1) -> PackedGptq:
    """Quantize a weight [N, K], as torch's linear layers hold it; a group of -1 is all of K.

    Symmetric weights have the zero 8. Zeros are never 0: less one, they would not fit.
    """
    outputs, inputs = weight.shape
    size = inputs if group == -1 else group
    grouped = weight.float().t().reshape(-1, size, outputs)
    low, high = grouped.amin(dim=1), grouped.amax(dim=1)  # [K / group, N]
    if sym:
        scales = (torch.maximum(high, -low) / 7).clamp(min=1e-5).half()
        zeros = torch.full_like(low, 8)
    else:
        scales = ((high - low) / 15).clamp(min=1e-5).half()
        zeros = (-low / scales.float()).round().clamp(1, 15)
    values = (grouped / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    return PackedGptq(
        _pack(values.reshape(inputs, outputs).t()).t().contiguous(),
        _pack(zeros - zero_offset),
        scales,
        torch.arange(inputs, dtype=torch.int32) // size,
    )


def dequantize_gptq(packed: PackedGptq, zero_offset: int = 1) -> Tensor:
    """Return the weight [N, K] in float32, by the format's definition."""
    inputs = len(packed.g_idx)
    rows = []
    for k in range(inputs):
        group = packed.g_idx[k]
        value = (packed.qweight[k // 8].long() >> (4 * (k % 8))) & 15
        column = torch.arange(packed.scales.shape[1])
        zero = (packed.qzeros[group].long()[column // 8] >> (4 * (column % 8))) & 15
        rows.append((value - (zero + zero_offset)).float() * packed.scales[group].float())
    return torch.stack(rows, dim=1)


def _pack(values: Tensor) -> Tensor:
    """Pack neighbouring columns, the first in the lowest bits."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for place in range(8):
        words |= values[:, place::8].long() << (4 * place)
    return words.to(torch.int32)  # the low 32 bits
