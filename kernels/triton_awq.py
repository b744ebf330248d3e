"""Triton: AWQ weights, dequantized, or multiplied without being dequantized in memory.

The layout is AutoAWQ's "GEMM": qweight int32 [K, N / 8], qzeros int32 [K / G, N / 8], scales
[K / G, N]. A word holds eight neighbouring columns; column c's four bits are at
4 · (0, 4, 1, 5, 2, 6, 3, 7)[c]. A weight is (q - zero) · scale, rounded to the computation's type.
"""

# Triton's language has no types for mypy to check.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferq.kernels.triton_pages import FP_FUSION

# (rows, columns, warps) of a dequantized tile, whatever the architecture. Not measured yet.
_DEQUANTIZE_TILE = (32, 128, 4)
# Outputs summed by one program of the reduction. Not measured yet.
_REDUCE_TILE = 1024


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows of x, columns, and weights along K of one step of the product; warps, stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# Rows of x up to which a tile is used -> the tile, for sm_80 and for sm_90 and later. From 64 rows
# on sm_90 multiplies with wgmma. Not measured yet.
_TILES = {
    8: {16: _Tile(16, 128, 64, 4, 4), 32: _Tile(32, 128, 64, 4, 4), 64: _Tile(64, 128, 64, 4, 3)},
    9: {16: _Tile(16, 128, 64, 4, 4), 32: _Tile(32, 128, 64, 4, 4), 64: _Tile(64, 128, 64, 4, 4)},
}
_LARGEST = {8: _Tile(128, 128, 64, 8, 3), 9: _Tile(128, 128, 64, 8, 4)}
# Programs wanted for each multiprocessor, and the least part of K worth one. Not measured yet.
_PROGRAMS_PER_PROCESSOR = 2
_MIN_SPLIT = 256


@triton.jit
def _unpack(words, zero_words, scales, dtype: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    """Give the weights [K, N] of words [K, N / 8], with zeros [1, N / 8] and scales [1, N]."""
    column = tl.arange(0, N) % 8
    shifts = ((column % 2) * 16 + (column // 2) * 4)[None, :]
    values = (_eight_times(words, K, N) >> shifts) & 0xF
    zeros = (_eight_times(zero_words, 1, N) >> shifts) & 0xF
    # Exact until the one rounding: differences are integers of at most 15.
    return ((values - zeros).to(tl.float32) * scales.to(tl.float32)).to(dtype)


@triton.jit
def _eight_times(words, K: tl.constexpr, N: tl.constexpr):
    """Repeat each of the words [K, N / 8] eight times: [K, N]."""
    words = tl.join(words, words)  # [K, N / 8, 2]
    words = tl.join(words, words)
    words = tl.join(words, words)
    return tl.reshape(words, [K, N])


@triton.jit
def _dequantize_kernel(
    out_ptr,
    weight_ptr,
    zero_ptr,
    scale_ptr,
    rows,
    columns,
    row_words,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
):
    o_k = (tl.program_id(0) * K + tl.arange(0, K)).to(tl.int64)[:, None]
    o_n = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    o_w = tl.program_id(1) * (N // 8) + tl.arange(0, N // 8)[None, :]
    m_w = o_w < row_words
    m_n = o_n < columns
    words = tl.load(weight_ptr + o_k * row_words + o_w, mask=(o_k < rows) & m_w, other=0)
    # A tile's rows are of one group: K divides it.
    group = (tl.program_id(0) * K // GROUP).to(tl.int64)
    zero_words = tl.load(zero_ptr + group * row_words + o_w, mask=m_w, other=0)
    scales = tl.load(scale_ptr + group * columns + o_n, mask=m_n, other=0.0)
    weights = _unpack(words, zero_words, scales, out_ptr.dtype.element_ty, K, N)
    tl.store(out_ptr + o_k * columns + o_n, weights, mask=(o_k < rows) & m_n)


# row_words is columns / 8: an argument, so that the compiler sees multiples of 16 in it.
# Not specialized: the rows of x change from step to step.
@triton.jit(do_not_specialize=["tokens"])
def _gemm_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    zero_ptr,
    scale_ptr,
    tokens,
    inputs,
    columns,
    row_words,
    split_inputs,
    x_stride,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    o_m = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)[:, None]
    o_n = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    o_w = tl.program_id(1) * (N // 8) + tl.arange(0, N // 8)[None, :]
    m_m, m_n, m_w = o_m < tokens, o_n < columns, o_w < row_words
    start = tl.program_id(2) * split_inputs
    acc = tl.zeros([M, N], tl.float32)
    for first in range(start, tl.minimum(start + split_inputs, inputs), K):
        o_k = first + tl.arange(0, K)
        m_k = o_k < inputs
        x = tl.load(x_ptr + o_m * x_stride + o_k[None, :], mask=m_m & m_k[None, :], other=0.0)
        p_words = weight_ptr + o_k.to(tl.int64)[:, None] * row_words + o_w
        words = tl.load(p_words, mask=m_k[:, None] & m_w, other=0)
        group = tl.cast(first // GROUP, tl.int64)
        zero_words = tl.load(zero_ptr + group * row_words + o_w, mask=m_w, other=0)
        scales = tl.load(scale_ptr + group * columns + o_n, mask=m_n, other=0.0)
        weights = _unpack(words, zero_words, scales, x_ptr.dtype.element_ty, K, N)
        acc = tl.dot(x, weights, acc, input_precision=PRECISION)
    p_out = out_ptr + o_m * columns + o_n
    if SPLIT:
        p_out += tl.program_id(2).to(tl.int64) * tokens * columns
    tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=m_m & m_n)


@triton.jit(do_not_specialize=["splits"])
def _reduce_kernel(out_ptr, partial_ptr, size, splits, TILE: tl.constexpr):
    """Add the splits in their order: the same sum in every run."""
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = places < size
    total = tl.zeros([TILE], tl.float32)
    for split in range(splits):
        p_partial = partial_ptr + tl.cast(split, tl.int64) * size + places
        total += tl.load(p_partial, mask=mask, other=0.0)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=mask)


def dequantize_constants(group: int) -> dict[str, Any]:
    """Give the compile-time constants and launch options of the dequantize kernel."""
    rows, columns, warps = _DEQUANTIZE_TILE
    return {"GROUP": group, "K": rows, "N": columns, "num_warps": warps, **FP_FUSION}


def dequantize(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int, dtype: torch.dtype
) -> Tensor:
    """Give the weights [K, N]; a group of 32, 64, 128, or K."""
    rows, columns = qweight.shape[0], scales.shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=qweight.device)
    constants = dequantize_constants(group)
    grid = (triton.cdiv(rows, constants["K"]), triton.cdiv(columns, constants["N"]))
    _dequantize_kernel[grid](
        out, qweight, qzeros, scales, rows, columns, qweight.shape[1], **constants
    )
    return out


def gemm_constants(
    tokens: int, inputs: int, group: int, dtype: torch.dtype, capability: int, *, split: bool
) -> dict[str, Any]:
    """Give the compile-time constants and launch options of the product.

    `capability` is the architecture's major version.
    """
    major = 8 if capability < 9 else 9
    fitting = (tile for most, tile in _TILES[major].items() if tokens <= most)
    tile = next(fitting, _LARGEST[major])
    return {
        "GROUP": group,
        "SPLIT": split,
        # float32 is for tests only.
        "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
        "M": tile.m,
        "N": tile.n,
        # All weights of a step are of one group; one that is all of K has no second.
        "K": tile.k if group == inputs else min(tile.k, group),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **FP_FUSION,
    }


def split_inputs(inputs: int, tiles: int, programs: int) -> tuple[int, int]:
    """Choose how many inputs each program sums up, and how many such splits there are.

    As few as fill the device with about `programs`, given the tiles of the output. The lengths are
    multiples of 128, so that no group is cut.
    """
    wanted = max(1, min(programs // tiles, inputs // _MIN_SPLIT))
    length = -(-inputs // wanted // 128) * 128
    return length, -(-inputs // length)


def gemm(x: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> Tensor:
    """Multiply x [T, K] with the weights, summing in float32; a group of 32, 64, 128, or K."""
    (tokens, inputs), columns = x.shape, scales.shape[1]
    out = torch.empty(tokens, columns, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    capability, processors = _device(x.device)
    constants = gemm_constants(tokens, inputs, group, x.dtype, capability, split=False)
    grid = (triton.cdiv(tokens, constants["M"]), triton.cdiv(columns, constants["N"]))
    programs = processors * _PROGRAMS_PER_PROCESSOR
    length, splits = split_inputs(inputs, grid[0] * grid[1], programs)
    target = out
    if splits > 1:
        constants["SPLIT"] = True
        target = torch.empty(splits, tokens, columns, dtype=torch.float32, device=x.device)
    weights = (qweight, qzeros, scales)
    _gemm_kernel[(*grid, splits)](
        target,
        x,
        *weights,
        tokens,
        inputs,
        columns,
        qweight.shape[1],
        length,
        x.stride(0),
        **constants,
    )
    if splits > 1:
        size = out.numel()
        _reduce_kernel[(triton.cdiv(size, _REDUCE_TILE),)](
            out, target, size, splits, TILE=_REDUCE_TILE, **FP_FUSION
        )
    return out


def _device(device: torch.device) -> tuple[int, int]:
    """Give a device's major compute capability and its multiprocessors."""
    if device.type != "cuda":  # the interpreter
        return 9, 1
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count
