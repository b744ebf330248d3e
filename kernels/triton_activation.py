"""Triton: gated activations."""

# Triton's language has no types for mypy to check.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferq.kernels.triton_pages import FP_FUSION

# Outputs computed by one program, whatever the size and the architecture. Not measured yet.
_TILE = 1024
_WARPS = 4
_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def _gate_and_mul_kernel(
    out_ptr,
    gate_up_ptr,
    row_stride,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = o_c < SIZE
    p_gate = gate_up_ptr + row * row_stride + o_c
    gate = tl.load(p_gate, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(p_gate + SIZE, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(y)) / 2 = sigmoid(2y), y = sqrt(2 / pi) · (x + 0.044715 x³)
        share = tl.sigmoid((gate + 0.044715 * gate * gate * gate) * _SQRT_8_OVER_PI)
    else:
        share = tl.sigmoid(gate)
    tl.store(out_ptr + row * SIZE + o_c, (gate * share * up).to(out_ptr.dtype.element_ty), mask)


def gate_and_mul_constants(size: int, *, gelu: bool) -> dict[str, Any]:
    """Give the compile-time constants and launch options of the kernel for rows of outputs."""
    return {"SIZE": size, "GELU": gelu, "TILE": _TILE, "num_warps": _WARPS, **FP_FUSION}


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) · up from [T, 2 · N] (gate, then up, in each row) to [T, N]."""
    return _launch(gate_up, gelu=False)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute gelu(gate) · up, with the tanh approximation, from [T, 2 · N] to [T, N]."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: Tensor, *, gelu: bool) -> Tensor:
    rows, width = gate_up.shape
    if width % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"[T, 2 · N] with contiguous rows is needed, not {tuple(gate_up.shape)}")
    out = torch.empty(rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        constants = gate_and_mul_constants(width // 2, gelu=gelu)
        _gate_and_mul_kernel[(rows, triton.cdiv(width // 2, _TILE))](
            out, gate_up, gate_up.stride(0), **constants
        )
    return out
