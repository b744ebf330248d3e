"""AWQ weights: four bits, a zero and a scale for each group of inputs, in AutoAWQ's GEMM format."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from inferq.kernels import reference
from inferq.kernels.dispatch import runs_triton

#: Inputs that may share a scale; -1 in a checkpoint, or all of them here, is one group.
GROUPS: Final = (32, 64, 128)
#: Rows from which dequantizing once and a plain product are quicker (vLLM's limit). Not measured
#: yet.
DEQUANTIZE_FROM: Final = 256
_PER_WORD: Final = 8
#: Of eight neighbouring columns, the one that each four bits of a word hold, from the lowest on.
_COLUMNS: Final = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """A weight [N, K] in this format, multiplied as it is."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    group: int

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias, of x's dtype."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        product = awq_linear(x, self.qweight, self.qzeros, self.scales, self.group)
        return product if bias is None else product.add_(bias)

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""
        return self.qweight.nbytes + self.qzeros.nbytes + self.scales.nbytes


def awq_dequantize(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    group: int,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Give the weights [K, N], in the scales' dtype or another.

    qweight is int32 [K, N / 8], qzeros int32 [K / group, N / 8], scales [K / group, N]; a group
    of -1 is all of K. Raises ValueError for what does not fit together.
    """
    group = check_awq(qweight, qzeros, scales, group)
    dtype = dtype or scales.dtype
    if not runs_triton(qweight):
        return reference.awq_dequantize(qweight, qzeros, scales, group, dtype)
    # Imported here: Triton may be absent.
    from inferq.kernels import triton_awq

    return triton_awq.dequantize(qweight, qzeros, scales, group, dtype)


def awq_linear(x: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> Tensor:
    """Multiply x [T, K] with weights as `awq_dequantize` takes them: [T, N] in x.dtype.

    Sums in float32, in the same order in every run.
    """
    if x.dim() != 2 or x.shape[1] != qweight.shape[0] or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} does not fit {qweight.shape[0]} inputs")
    if runs_triton(x) and x.shape[0] < DEQUANTIZE_FROM:
        from inferq.kernels import triton_awq

        group = check_awq(qweight, qzeros, scales, group)
        return triton_awq.gemm(x, qweight, qzeros, scales, group)
    return x @ awq_dequantize(qweight, qzeros, scales, group, dtype=x.dtype)


def unpack_awq_words(words: Tensor) -> Tensor:
    """Return the values [N, K], uint8 from 0 to 15, of int32 words [K, N / 8]."""
    rows, columns = words.shape
    values = torch.empty(columns, _PER_WORD, rows, dtype=torch.uint8, device=words.device)
    for place, column in enumerate(_COLUMNS):
        values[:, column] = nibbles(words, place).T
    return values.flatten(0, 1)


def nibbles(words: Tensor, place: int) -> Tensor:
    """Return the four bits at `place` of each int32 word, counted from the lowest, as uint8."""
    # By bytes: words would be shifted in int32, which takes as much memory as all values.
    pairs = words.view(torch.uint8).view(*words.shape, 4)[..., place // 2]
    return pairs.bitwise_right_shift(4) if place % 2 else pairs.bitwise_and(15)


def pack_awq_words(values: Tensor) -> Tensor:
    """Return the int32 words [K, N / 8] of values [K, N] from 0 to 15."""
    rows, outputs = values.shape
    words = torch.zeros(rows, outputs // _PER_WORD, dtype=torch.int32, device=values.device)
    for place, column in enumerate(_COLUMNS):
        words |= values[:, column::_PER_WORD].int() << 4 * place
    return words


def check_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> int:
    """Return the group's size; raise ValueError, naming the numbers, for what does not fit."""
    inputs, words = qweight.shape
    outputs = scales.shape[1]
    if outputs % _PER_WORD or words * _PER_WORD != outputs:
        raise ValueError(
            f"{words} words of {_PER_WORD} weights do not hold {outputs} outputs: "
            f"outputs must be a multiple of {_PER_WORD}"
        )
    size = inputs if group == -1 else group
    if size not in (*GROUPS, inputs):
        raise ValueError(f"groups of {group} inputs are not supported: choose from {GROUPS} or -1")
    if inputs % size:
        raise ValueError(f"{inputs} inputs are no multiple of the group size {size}")
    if inputs % _PER_WORD:
        raise ValueError(f"{inputs} inputs are no multiple of {_PER_WORD}")
    groups = inputs // size
    if scales.shape[0] != groups or tuple(qzeros.shape) != (groups, words):
        raise ValueError(
            f"{groups} groups of {size} inputs need scales [{groups}, {outputs}] and zeros "
            f"[{groups}, {words}], not {list(scales.shape)} and {list(qzeros.shape)}"
        )
    if qweight.dtype != torch.int32 or qzeros.dtype != torch.int32:
        raise ValueError(f"packed weights are int32, not {qweight.dtype} and {qzeros.dtype}")
    if not (qweight.is_contiguous() and qzeros.is_contiguous() and scales.is_contiguous()):
        raise ValueError("packed weights, zeros and scales must be contiguous")
    return size
