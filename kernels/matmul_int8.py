"""Products with int8 weights: a scale per output, and activations quantized by groups of inputs.

Each 64 inputs of a row have their own scale, so a row's result does not depend on the rows beside
it. The integer sums are exact: every form and machine gives the same up to float32's rounding.
SmolLM2-135M on 992 tokens of prose, perplexity and mean change of a token's log-probability:
float32 76.8; weights alone rounded 77.3, 0.08; activations in groups of 64 too 78.7, 0.13; with one
scale per row 81.2, 0.22. With one scale for all rows, which is fbgemm's form, results would depend
on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from inferq.kernels.huge_pages import HugePages
from inferq.kernels.matmul import NativeForm, dense_rows, native_kernel, native_product, panel_rows
from inferq.kernels.native.library import DTYPE_CODES, native_function

#: Largest magnitude: -128 is not used, so that a weight's negative fits too.
LARGEST: Final = 127
#: Inputs of a row of x that share a scale; the same in `native/matmul_int8.cpp`.
GROUP: Final = 64
_PACK = ("inferq_int8_pack", "pllp")
_LAYOUT = ("inferq_int8_layout", "llpp")
_LINEAR = ("inferq_int8_linear", "plppppllli")


@dataclass(frozen=True, slots=True)
class NativeInt8Weight(NativeForm):
    """[panels, steps, panel, 4] bytes, `offset` added, and scales of whole panels."""

    weight: Tensor
    scales: Tensor
    offset: int
    outputs: int
    inputs: int
    dtype: torch.dtype

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias."""
        x = dense_rows(x, self.dtype)
        packed, code = (self.weight, self.scales), DTYPE_CODES[x.dtype]
        return native_product(_LINEAR, x, packed, bias, self.inputs, self.outputs, code)

    def rows(self, indices: Tensor) -> Tensor:
        """Return the rows at indices [T], as they were rounded."""
        stored = self.weight if self.offset else self.weight.view(torch.int8)
        values = panel_rows(stored, indices, self.inputs).float() - self.offset
        return (values * self.scales[indices, None]).to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""
        return self.weight.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class TorchInt8Weight:
    """[groups, GROUP, N] int8, padded with zeros, and scales [N], for torch's integer product."""

    weight: Tensor
    scales: Tensor
    inputs: int
    dtype: torch.dtype

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias."""
        product = x.new_zeros(x.shape[0], len(self.scales), dtype=torch.float32)
        padding = self.weight.shape[0] * GROUP - self.inputs
        padded = pad(dense_rows(x, self.dtype).float(), (0, padding))
        for weight, part in zip(self.weight, torch.split(padded, GROUP, dim=1), strict=True):
            if x.shape[0]:
                values, scales = quantize_rows(part)
                sums = torch._int_mm(values, weight)  # noqa: SLF001 - no public name on the CPU
                product.addcmul_(sums.float(), scales)
        product *= self.scales
        return (product if bias is None else product.add_(bias)).to(self.dtype)

    def rows(self, indices: Tensor) -> Tensor:
        """Return the rows at indices [T], as they were rounded."""
        values = self.weight[:, :, indices].flatten(0, 1)[: self.inputs].T.contiguous()
        return (values * self.scales[indices, None]).to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""
        return self.weight.nbytes + self.scales.nbytes


Int8Weight = NativeInt8Weight | TorchInt8Weight


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 q [T, K] and float32 scales [T, 1] with x ≈ scales · q, for x in float32."""
    largest = x.abs().amax(1, keepdim=True)
    inverse = torch.where(largest > 0, LARGEST / largest, 0.0)
    return (x * inverse).round_().to(torch.int8), largest / LARGEST


def pack_int8(weight: Tensor, memory: HugePages) -> Int8Weight:
    """Quantize a weight [N, K] on the CPU and return its fastest form.

    GFLOP/s on 2 Zen 4 cores, [3072, 576] not in the cache, by rows of x: native 64 (1), 275 (4),
    546 (16), 667 (64), 787 (256); torch's dynamic fbgemm 87 (in the cache), 243, 376, 509, 627 with
    one scale for all rows together.
    """
    outputs, inputs = weight.shape
    values, scales = quantize_rows(weight.float())
    scales = scales[:, 0]
    if weight.dtype not in DTYPE_CODES or native_function(*_LAYOUT) is None:
        padded = pad(values, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
        return TorchInt8Weight(padded.permute(1, 2, 0).contiguous(), scales, inputs, weight.dtype)
    shape = torch.empty(4, dtype=torch.int64)
    offset = torch.empty(1, dtype=torch.int64)
    native_kernel(*_LAYOUT)(outputs, inputs, shape.data_ptr(), offset.data_ptr())
    packed = memory.empty(tuple(shape.tolist()), torch.uint8)
    native_kernel(*_PACK)(values.data_ptr(), outputs, inputs, packed.data_ptr())
    padded_scales = pad(scales, (0, packed.shape[0] * packed.shape[2] - outputs))
    return NativeInt8Weight(packed, padded_scales, int(offset), outputs, inputs, weight.dtype)
