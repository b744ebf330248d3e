"""Triton: root mean square normalisation of rows, with or without a residual added first."""

# Triton's language has no types for mypy to check.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferq.kernels.triton_pages import FP_FUSION

# Padded row -> (rows of one program, warps); longer rows: one a program, 16 warps. Not measured
# yet, on any architecture.
_TILES = {64: (16, 4), 128: (16, 4), 256: (8, 4), 512: (4, 4), 1024: (2, 4), 2048: (1, 4)}
_TILES |= {4096: (1, 8), 8192: (1, 8)}


# Not specialized: the rows of a step, lest every kind of number compile the kernel again.
@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    out_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    eps,
    rows,
    heads,
    x_token_stride,
    x_head_stride,
    residual_token_stride,
    residual_head_stride,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # [ROWS, 1]
    token = row // heads
    head = row % heads
    o_c = tl.arange(0, TILE)
    m_c = o_c < SIZE
    mask = (row < rows) & m_c[None, :]
    p_x = x_ptr + token * x_token_stride + head * x_head_stride + o_c[None, :]
    x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)  # [ROWS, TILE]
    if ADD:
        p_r = residual_ptr + token * residual_token_stride + head * residual_head_stride
        p_r += o_c[None, :]
        # What is normalised is what is kept: the sum as the residual's type rounds it.
        total = (x + tl.load(p_r, mask=mask, other=0.0).to(tl.float32)).to(
            residual_ptr.dtype.element_ty
        )
        tl.store(p_r, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    weight = tl.load(weight_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)
    normed = x * scale[:, None] * weight[None, :]
    tl.store(out_ptr + row * SIZE + o_c[None, :], normed.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm_constants(size: int, *, add: bool) -> dict[str, Any]:
    """Give the compile-time constants and launch options of the kernel for rows of a size."""
    tile = max(64, triton.next_power_of_2(size))
    rows, warps = _TILES.get(tile, (1, 16))
    return {"SIZE": size, "ADD": add, "ROWS": rows, "TILE": tile, "num_warps": warps, **FP_FUSION}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in float32 and scale by weight; returns x.dtype."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add x to the residual, in place, and normalise the sum; returns both."""
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}, its residual {tuple(residual.shape)} "
            f"{residual.dtype}"
        )
    return _launch(x, residual, weight, eps), residual


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    if weight.shape != (size,) or not weight.is_contiguous():
        raise ValueError(f"the weight {tuple(weight.shape)} does not fit rows of {size}")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    heads, *strides = _row_strides(x)
    added = x if residual is None else residual
    added_heads, *added_strides = _row_strides(added)
    if added_heads != heads:
        raise ValueError(f"x {x.stride()} and its residual {added.stride()} are laid out unlike")
    rows = math.prod(x.shape[:-1])
    constants = rms_norm_constants(size, add=residual is not None)
    _rms_norm_kernel[(triton.cdiv(rows, constants["ROWS"]),)](
        out, x, added, weight, eps, rows, heads, *strides, *added_strides, **constants
    )
    return out


def _row_strides(x: Tensor) -> tuple[int, int, int]:
    """Give the heads of a token, and the strides from token to token and from head to head."""
    if x.stride(-1) != 1:
        raise ValueError("rows must be contiguous (last stride 1)")
    if x.dim() == 3:
        return x.shape[1], x.stride(0), x.stride(1)
    if x.dim() != 2:
        raise ValueError(f"rows come as [T, size] or [T, heads, size], not {tuple(x.shape)}")
    return 1, x.stride(0), 0
