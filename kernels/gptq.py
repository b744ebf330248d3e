"""GPTQ weights of four bits, turned into what the other formats are multiplied as.

qweight is int32 [K / 8, N]: a word holds eight neighbouring inputs of one output, the first in its
lowest bits. qzeros is int32 [K / G, N / 8], with eight neighbouring outputs in a word; scales are
[K / G, N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferq.kernels.awq import nibbles

_PER_WORD = 8


def unpack_gptq(qweight: Tensor, qzeros: Tensor, zero_offset: int) -> tuple[Tensor, Tensor]:
    """Return values [N, K] and zeros [N, K / G] as uint8 from 0 to 15.

    `zero_offset` is added to the zeros, modulo 16: the first version of the format stores them
    less one.
    """
    rows, outputs = qweight.shape
    groups, columns = qzeros.shape
    values = torch.empty(outputs, rows, _PER_WORD, dtype=torch.uint8, device=qweight.device)
    zeros = torch.empty(columns, _PER_WORD, groups, dtype=torch.uint8, device=qzeros.device)
    for place in range(_PER_WORD):
        values[..., place] = nibbles(qweight, place).T
        zeros[:, place] = (nibbles(qzeros, place).T + zero_offset) & 15
    return values.flatten(1), zeros.flatten(0, 1)
