"""Matrix products with a weight in the layout that its device multiplies fastest.

Each form is made once from a plain weight [N, K]; `multiply` then computes x · weightᵀ + bias for
x [T, K], and `rows` of most forms reads single rows back, as an embedding does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from inferq.kernels.huge_pages import HugePages
from inferq.kernels.native.library import DTYPE_CODES, native_function

_PACK = ("inferq_float_pack", "plliip")
_LAYOUT = ("inferq_float_layout", "lliip")
_LINEAR = ("inferq_float_linear", "plppplllii")


class Weight(Protocol):
    """A weight [N, K] in some layout."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [T, K] · weightᵀ + bias [N], of x's dtype."""

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""


@runtime_checkable
class ReadableWeight(Weight, Protocol):
    """A weight [N, K] whose rows can be read back."""

    def rows(self, indices: Tensor) -> Tensor:
        """Return the rows [T, K] at indices [T]."""


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """[N, K] as it is, for torch's linear."""

    weight: Tensor

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias."""
        return linear(x, self.weight, bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Return the rows at indices [T]."""
        return embedding(indices, self.weight)

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class OneDnnWeight:
    """Reordered once into oneDNN's own layout, which torch would otherwise do in every call."""

    weight: Tensor
    size: int

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias."""
        if not x.shape[0]:
            return x.new_empty(0, self.weight.shape[0])
        pointwise = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - torch.compile's own
        product: Tensor = pointwise(x, self.weight, bias, "none", [], "")
        return product

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""
        return self.size


class NativeForm:
    """What the forms for kernels of `native/` have in common: these add biases in float32."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class NativeWeight(NativeForm):
    """[panels, steps, panel, step] for the kernels of `native/matmul_float.cpp`."""

    weight: Tensor
    outputs: int
    inputs: int
    #: Of x: the weight's, or float32.
    dtype: torch.dtype

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weightᵀ + bias; a row's result does not depend on the other rows."""
        x = dense_rows(x, self.dtype)
        codes = (DTYPE_CODES[x.dtype], DTYPE_CODES[self.weight.dtype])
        return native_product(_LINEAR, x, (self.weight,), bias, self.inputs, self.outputs, *codes)

    def rows(self, indices: Tensor) -> Tensor:
        """Return the rows at indices [T], of x's dtype."""
        return panel_rows(self.weight, indices, self.inputs).to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Memory that the weight takes."""
        return self.weight.nbytes


def pack_float(weight: Tensor, memory: HugePages, dtype: torch.dtype | None = None) -> Weight:
    """Return the fastest form of a weight [N, K] that is not quantized.

    x has the weight's dtype, or `dtype`. A 16-bit weight that meets float32 stays as it is where
    our own kernels run: half to read, and the same products.

    GFLOP/s on 2 Zen 4 cores, float32, [3072, 576] not in the cache, by rows of x:
    plain 5.6 (1), 18 (4), 68 (16), 134 (64), 166 (256); oneDNN 12, 54, 141, 186, 209;
    native 26, 95, 214, 218, 208. bfloat16: oneDNN 26, 118, 275, 385, 417; native 32, 128, 400,
    411, 427.
    """
    dtype = dtype or weight.dtype
    if weight.dtype != dtype:
        if can_stay_narrow(weight.dtype, dtype, weight.device):
            return _pack_native(weight, memory, dtype)
        weight = weight.to(dtype)
    if weight.device.type != "cpu" or not weight.dtype.is_floating_point:
        return PlainWeight(weight)
    native_is_best = weight.dtype in DTYPE_CODES and not _has_matrix_tiles(weight.dtype)
    if native_is_best and native_function(*_LAYOUT) is not None:
        return _pack_native(weight, memory, dtype)
    if _is_onednn_fast(weight.dtype):
        reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 - torch.compile's own
        return OneDnnWeight(reorder(weight.contiguous()), weight.nbytes)
    return PlainWeight(weight)


def can_stay_narrow(weight: torch.dtype, x: torch.dtype, device: torch.device) -> bool:
    """Whether a weight of one dtype is multiplied as it is with an x of another."""
    return (
        x == torch.float32
        and weight in (torch.bfloat16, torch.float16)
        and device.type == "cpu"
        and native_function(*_LAYOUT) is not None
    )


def _pack_native(weight: Tensor, memory: HugePages, dtype: torch.dtype) -> NativeWeight:
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    shape = torch.empty(4, dtype=torch.int64)
    codes = DTYPE_CODES[dtype], DTYPE_CODES[weight.dtype]
    native_kernel(*_LAYOUT)(outputs, inputs, *codes, shape.data_ptr())
    packed = memory.empty(tuple(shape.tolist()), weight.dtype)
    native_kernel(*_PACK)(weight.data_ptr(), outputs, inputs, *codes, packed.data_ptr())
    return NativeWeight(packed, outputs, inputs, dtype)


def _has_matrix_tiles(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype in the processor's matrix unit, which we do not."""
    return dtype == torch.bfloat16 and bool(torch.cpu._is_amx_tile_supported())  # noqa: SLF001


def _is_onednn_fast(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return dtype == torch.float32


def native_kernel(name: str, signature: str) -> Callable[..., None]:
    """Return a native kernel that was there when the weight was packed."""
    function = native_function(name, signature)
    if function is None:
        raise RuntimeError(f"{name} is not loaded")
    return function


def native_product(
    kernel: tuple[str, str],
    x: Tensor,
    packed: tuple[Tensor, ...],
    bias: Tensor | None,
    inputs: int,
    outputs: int,
    *codes: int,
) -> Tensor:
    """Multiply dense rows x [T, K] by a packed weight; `codes` end the kernel's arguments."""
    out = torch.empty(x.shape[0], outputs, dtype=x.dtype)
    if x.shape[0]:
        bias = None if bias is None else bias.float().contiguous()
        native_kernel(*kernel)(
            x.data_ptr(),
            x.stride(0),
            *[tensor.data_ptr() for tensor in packed],
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            inputs,
            outputs,
            *codes,
        )
    return out


def dense_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x with elements of a row next to each other; raises `TypeError` on another dtype."""
    if x.dtype != dtype:
        raise TypeError(f"the weight is {dtype}, x is {x.dtype}")
    return x if x.stride(-1) == 1 else x.contiguous()


def panel_rows(packed: Tensor, indices: Tensor, inputs: int) -> Tensor:
    """Read rows back out of [panels, steps, panel, step]; returns [T, inputs]."""
    panel = packed.shape[2]
    found = packed[indices // panel, :, indices % panel]
    return found.reshape(len(indices), -1)[:, :inputs].contiguous()
