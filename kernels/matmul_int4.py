"""Products with 4-bit weights: a scale and a zero point for each group of inputs of an output.

weight[n, k] = (q[n, k] - zeros[n, k // group]) · scales[n, k // group], q in 0 to 15.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from inferq.kernels.huge_pages import HugePages
from inferq.kernels.matmul import NativeForm, dense_rows, native_kernel, native_product
from inferq.kernels.native.library import DTYPE_CODES, native_function

_PACK = ("inferq_int4_pack", "ppplllppp")
_LAYOUT = ("inferq_int4_layout", "lllp")
_LINEAR = ("inferq_int4_linear", "plppppplllli")
#: Groups, and a divisor of the outputs, that torch's own kernel takes.
_TORCH_GROUPS: Final = (32, 64, 128, 256)
_TORCH_OUTPUTS: Final = 16


@dataclass(frozen=True, slots=True)
class NativeInt4Weight(NativeForm):
    """[panels, groups, steps, panel, 4] bytes of two values, scales and zeros by panel.

    Activations are quantized to int8 in the same groups: 0.8 % of the result's norm.
    """

    weight: Tensor
    scales: Tensor
    zeros: Tensor
    outputs: int
    inputs: int
    group: int

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias, for float32, bfloat16 or float16."""
        x = dense_rows(x, x.dtype)
        packed, codes = (self.weight, self.scales, self.zeros), (self.group, DTYPE_CODES[x.dtype])
        return native_product(_LINEAR, x, packed, bias, self.inputs, self.outputs, *codes)

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""
        return self.weight.nbytes + self.scales.nbytes + self.zeros.nbytes


@dataclass(frozen=True, slots=True)
class TorchInt4Weight:
    """For torch's kernel, whose activations are bfloat16: others take it a hundred times longer."""

    weight: Tensor
    scales_and_zeros: Tensor
    group: int

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias; x is rounded to bfloat16."""
        if not x.shape[0]:
            return x.new_empty(0, self.scales_and_zeros.shape[1])
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(  # noqa: SLF001 - none public
            x.to(torch.bfloat16).contiguous(), self.weight, self.group, self.scales_and_zeros
        )
        product = product.to(x.dtype)
        return product if bias is None else product + bias

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""
        return self.weight.nbytes + self.scales_and_zeros.nbytes


@dataclass(frozen=True, slots=True)
class UnpackedInt4Weight:
    """Made whole in every call: for shapes that no kernel takes."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor
    group: int

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias."""
        weight = dequantize_int4(self.weight, self.scales, self.zeros, self.group)
        return linear(x, weight.to(x.dtype), bias)

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""
        return self.weight.nbytes + self.scales.nbytes + self.zeros.nbytes


Int4Weight = NativeInt4Weight | TorchInt4Weight | UnpackedInt4Weight


def dequantize_int4(weight: Tensor, scales: Tensor, zeros: Tensor, group: int) -> Tensor:
    """Return the float32 weight [N, K] of values [N, K], scales and zeros [N, K / group]."""
    size = weight.shape[1] if group == -1 else group
    grouped = weight.float().view(weight.shape[0], -1, size)
    return (grouped - zeros.float()[..., None]).mul_(scales.float()[..., None]).flatten(1)


def pack_int4(
    weight: Tensor, scales: Tensor, zeros: Tensor, group: int, memory: HugePages | None = None
) -> Int4Weight:
    """Return the fastest form of 4-bit values [N, K] with scales and zeros [N, K / group].

    Values and zeros are whole numbers from 0 to 15 in any integer dtype; group -1 is all of K.
    Raises `ValueError` for shapes that do not fit together and for values out of range.
    GFLOP/s on 2 Zen 4 cores, [3072, 576], groups of 64, not in the cache, by rows of x: native 129
    (1), 352 (4), 478 (16), 519 (64), 608 (256); torch's kernel 55, 144, 158, 163, 160.
    """
    _check(weight, scales, zeros, group)
    outputs, inputs = weight.shape
    group = inputs if group == -1 else group
    weight, zeros = weight.to(torch.uint8).contiguous(), zeros.to(torch.uint8).contiguous()
    scales = scales.float().contiguous()
    if native_function(*_LAYOUT) is not None:
        return _pack_native(weight, scales, zeros, group, memory or HugePages())
    if group in _TORCH_GROUPS and not outputs % _TORCH_OUTPUTS:
        # Its zero is what stands for the value 8.
        middles = (8 - zeros.float()) * scales
        pairs = torch.stack([scales, middles], dim=-1).transpose(0, 1)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(  # noqa: SLF001 - see above
            weight.int(), 1
        )
        return TorchInt4Weight(packed, pairs.to(torch.bfloat16).contiguous(), group)
    return UnpackedInt4Weight(weight, scales, zeros, group)


def linear_int4(x: Tensor, packed: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """Return x [T, K] · weightᵀ + bias [N]; of x's dtype."""
    return packed.multiply(x, bias)


def _pack_native(
    weight: Tensor, scales: Tensor, zeros: Tensor, group: int, memory: HugePages
) -> NativeInt4Weight:
    outputs, inputs = weight.shape
    shape = torch.empty(5, dtype=torch.int64)
    native_kernel(*_LAYOUT)(outputs, inputs, group, shape.data_ptr())
    panels, groups, _, panel, _ = sizes = tuple(shape.tolist())
    packed = NativeInt4Weight(
        memory.empty(sizes, torch.uint8),
        memory.empty((panels, groups, panel), torch.float32),
        memory.empty((panels, groups, panel), torch.uint8),
        outputs,
        inputs,
        group,
    )
    native_kernel(*_PACK)(
        weight.data_ptr(),
        scales.data_ptr(),
        zeros.data_ptr(),
        outputs,
        inputs,
        group,
        packed.weight.data_ptr(),
        packed.scales.data_ptr(),
        packed.zeros.data_ptr(),
    )
    return packed


def _check(weight: Tensor, scales: Tensor, zeros: Tensor, group: int) -> None:
    outputs, inputs = weight.shape
    size = inputs if group == -1 else group
    if size < 1 or inputs % size:
        raise ValueError(f"{inputs} inputs cannot be divided into groups of {group}")
    expected = (outputs, inputs // size)
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} have shape {list(tensor.shape)}, not {list(expected)}")
    for name, tensor in (("values", weight), ("zeros", zeros)):
        if tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) <= 15:
            raise ValueError(f"{name} are not all from 0 to 15")
