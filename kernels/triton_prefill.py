"""Triton: paged attention for many query tokens per sequence, with cached prefix and window.

FlashAttention-2 (Dao, 2023) over a ragged batch: one program for each query head and tile of query
rows; tiles of keys that the causal order or the window hides are never read.
"""

# Triton's language has no types for mypy to check.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferq.kernels.triton_pages import (
    FP_FUSION,
    cached_rows,
    dot_precision,
    scaled_scores,
    softmax_step,
)

# (padded head_dim, bytes of a cache element) -> (query rows, keys in a tile, warps, stages).
# Not measured yet; the largest that spill no registers on sm_80, sm_90 and sm_100.
_TILES = {
    (64, 2): (128, 64, 8, 3),
    (128, 2): (128, 64, 8, 2),
    (256, 2): (64, 32, 8, 2),
    (64, 4): (32, 32, 4, 2),
    (128, 4): (32, 32, 8, 2),
    (256, 4): (16, 16, 8, 2),
}
# Bytes of a padded head from which all tiles are masked: the loop without a mask, beside the other,
# spills registers there.
_MASK_ALL_BYTES = 512


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Tiles of query rows: each belongs to one sequence and starts at a row of it."""

    sequences: Tensor  # int32 [tiles]
    offsets: Tensor  # int32 [tiles]


@triton.jit
def _prefill_range(
    acc,
    row_max,
    row_sum,
    query,
    positions,
    start,
    end,
    oldest,
    newest,
    p_kv,
    p_table,
    scale,
    soft_cap,
    window,
    kv_block_stride,
    kv_part_stride,
    kv_token_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    """Fold the keys of [start, end) into the running softmax of one tile of query rows."""
    o_d = tl.arange(0, D)
    for tile in range(start, end, N):
        o_n = tile + tl.arange(0, N)
        # Only tokens some row may see are read: a freed page may hold NaN, and 0 · NaN is NaN.
        m_n = (o_n >= oldest) & (o_n < newest)
        m_kv = m_n[:, None] & (o_d < HEAD_DIM)[None, :]
        rows = cached_rows(o_n, m_n, p_table, kv_block_stride, kv_token_stride, BLOCK_SIZE)
        key = tl.load(p_kv + rows[:, None], mask=m_kv, other=0.0)  # [N, D]
        value = tl.load(p_kv + kv_part_stride + rows[:, None], mask=m_kv, other=0.0)
        scores = scaled_scores(query, key, scale, soft_cap, SOFT_CAP, PRECISION)  # [M, N]
        if MASKED:
            age = positions[:, None] - o_n[None, :]
            visible = age >= 0
            if WINDOW:
                visible = visible & (age < window)
            scores = tl.where(visible, scores, float("-inf"))
        acc, row_max, row_sum = softmax_step(acc, row_max, row_sum, scores, value, PRECISION)
    return acc, row_max, row_sum


# Not specialized: values that change from step to step must not compile the kernel again.
@triton.jit(do_not_specialize=["window", "table_stride"])
def _prefill_kernel(
    out_ptr,
    query_ptr,
    kv_ptr,
    table_ptr,
    seq_len_ptr,
    query_start_ptr,
    tile_sequence_ptr,
    tile_offset_ptr,
    scale,
    soft_cap,
    window,
    out_token_stride,
    out_head_stride,
    query_token_stride,
    query_head_stride,
    table_stride,
    kv_block_stride,
    kv_part_stride,
    kv_token_stride,
    kv_head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    FULL_TILES: tl.constexpr,  # tiles that all rows see in full are folded without a mask
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    sequence = tl.load(tile_sequence_ptr + tl.program_id(1)).to(tl.int64)
    offset = tl.load(tile_offset_ptr + tl.program_id(1))
    seq_len = tl.load(seq_len_ptr + sequence)
    query_start = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - query_start
    first = seq_len - query_len + offset  # the position of the tile's first row

    o_m = tl.arange(0, M)
    o_d = tl.arange(0, D)
    positions = first + o_m
    m_q = ((offset + o_m) < query_len)[:, None] & (o_d < HEAD_DIM)[None, :]
    rows = (query_start + offset + o_m).to(tl.int64)[:, None]
    p_q = query_ptr + rows * query_token_stride + head * query_head_stride + o_d[None, :]
    query = tl.load(p_q, mask=m_q, other=0.0).to(kv_ptr.dtype.element_ty)  # [M, D]

    acc = tl.zeros([M, D], dtype=tl.float32)
    row_max = tl.full([M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([M], dtype=tl.float32)
    newest = tl.minimum(first + M, seq_len)
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(first + 1 - window, 0)
    start = oldest // N * N
    full = start
    if FULL_TILES:
        full = tl.maximum(first + 1, 0) // N * N
    p_kv = kv_ptr + (head // GROUP) * kv_head_stride + o_d[None, :]
    p_table = table_ptr + sequence * table_stride
    if FULL_TILES:
        acc, row_max, row_sum = _prefill_range(
            acc, row_max, row_sum, query, positions, start, full, oldest, newest, p_kv, p_table,
            scale, soft_cap, window, kv_block_stride, kv_part_stride, kv_token_stride,
            HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, False, PRECISION, N, D,
        )  # fmt: skip
    acc, row_max, row_sum = _prefill_range(
        acc, row_max, row_sum, query, positions, full, newest, oldest, newest, p_kv, p_table,
        scale, soft_cap, window, kv_block_stride, kv_part_stride, kv_token_stride,
        HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP, True, PRECISION, N, D,
    )  # fmt: skip
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    p_o = out_ptr + rows * out_token_stride + head * out_head_stride + o_d[None, :]
    tl.store(p_o, acc.to(out_ptr.dtype.element_ty), mask=m_q)


def prefill_constants(
    head_dim: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    window: bool,
    soft_cap: bool,
) -> dict[str, Any]:
    """Give the compile-time constants and launch options of the prefill kernel for a cache."""
    dim_tile = _dim_tile(head_dim)
    rows, keys, warps, stages = _TILES[dim_tile, dtype.itemsize]
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "FULL_TILES": not window and dim_tile * dtype.itemsize < _MASK_ALL_BYTES,
        "PRECISION": dot_precision(dtype),
        "M": rows,
        "N": keys,
        "D": dim_tile,
        "num_warps": warps,
        "num_stages": stages,
        **FP_FUSION,
    }


def tile_rows(head_dim: int, element_size: int) -> int:
    """Give the query rows of a tile, by which the step's tiles are planned."""
    return _TILES[_dim_tile(head_dim), element_size][0]


def prefill_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    out: Tensor,
    tiles: PrefillTiles,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Attend from the tiles' rows of query [T, heads, head_dim] into the same rows of out."""
    heads, head_dim = query.shape[1], query.shape[2]
    constants = prefill_constants(
        head_dim,
        heads // kv_layer.shape[3],
        kv_layer.shape[2],
        kv_layer.dtype,
        window=window is not None,
        soft_cap=soft_cap is not None,
    )
    _prefill_kernel[(heads, tiles.sequences.numel())](
        out,
        query,
        kv_layer,
        block_tables,
        seq_lens,
        query_starts,
        tiles.sequences,
        tiles.offsets,
        scale,
        soft_cap or 1.0,
        window or 0,
        out.stride(0),
        out.stride(1),
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        kv_layer.stride(3),
        **constants,
    )


def _dim_tile(head_dim: int) -> int:
    return max(64, int(triton.next_power_of_2(head_dim)))
