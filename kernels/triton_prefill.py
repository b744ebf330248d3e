"""Triton: paged attention for many query tokens per sequence, with cached prefix and window.

FlashAttention-2 (Dao, 2023) over a ragged batch: one program for each KV head and tile of query
tokens; the query heads of the KV head lie side by side in the tile's rows. Tiles of keys that the
causal order or the window hides are never read.
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


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """Tile of one program: query rows (tokens times heads of a KV head), keys, warps, stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# Architecture -> (padded head_dim, bytes of a cache element). Not measured yet: the largest that
# spill no registers with Triton 3.6 to 3.9. Page numbers come one load earlier than keys and
# values: with five stages two tiles of them are on their way while one is folded, with fewer just
# one. What stands under sm_80 also runs on consumer devices, where a block has 99 KiB of shared
# memory.
_TILES = {
    80: {
        (64, 2): PrefillTile(128, 32, 8, 5),
        (128, 2): PrefillTile(128, 32, 8, 5),
        (256, 2): PrefillTile(64, 16, 8, 5),
        (64, 4): PrefillTile(32, 32, 8, 5),
        (128, 4): PrefillTile(16, 16, 8, 5),
        (256, 4): PrefillTile(16, 16, 8, 5),
    },
    90: {
        (64, 2): PrefillTile(128, 64, 8, 5),
        (128, 2): PrefillTile(128, 64, 8, 5),
        (256, 2): PrefillTile(128, 32, 8, 5),
        (64, 4): PrefillTile(32, 32, 8, 5),
        (128, 4): PrefillTile(16, 16, 8, 5),
        (256, 4): PrefillTile(16, 16, 8, 5),
    },
    100: {
        (64, 2): PrefillTile(128, 32, 8, 5),
        (128, 2): PrefillTile(128, 64, 8, 5),
        (256, 2): PrefillTile(128, 32, 8, 5),
        (64, 4): PrefillTile(32, 32, 8, 5),
        (128, 4): PrefillTile(16, 16, 8, 5),
        (256, 4): PrefillTile(16, 16, 8, 3),
    },
}
# Bytes of a padded head from which all tiles are masked: the loop without a mask, beside the other,
# spills registers there.
_MASK_ALL_BYTES = 512


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
@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "seq_len_ptr", "query_start_ptr", "tile_ptr"],
)
def _prefill_kernel(
    out_ptr,
    query_ptr,
    kv_ptr,
    table_ptr,
    seq_len_ptr,
    query_start_ptr,
    tile_ptr,
    scale,
    soft_cap,
    window,
    kv_heads,
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
    # One dimension: the second of a grid ends at 65,535. Heads of a token run together.
    kv_head = (tl.program_id(0) % kv_heads).to(tl.int64)
    tile = tl.program_id(0) // kv_heads
    sequence = tl.load(tile_ptr + 2 * tile).to(tl.int64)
    offset = tl.load(tile_ptr + 2 * tile + 1)
    seq_len = tl.load(seq_len_ptr + sequence)
    query_start = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - query_start
    first = seq_len - query_len + offset  # the position of the tile's first token

    TOKENS: tl.constexpr = M // GROUP
    o_m = tl.arange(0, M)
    o_t = o_m // GROUP
    o_d = tl.arange(0, D)
    positions = first + o_t
    m_q = ((o_t < TOKENS) & ((offset + o_t) < query_len))[:, None] & (o_d < HEAD_DIM)[None, :]
    rows = (query_start + offset + o_t).to(tl.int64)[:, None]
    heads = (kv_head * GROUP + o_m % GROUP)[:, None]
    p_q = query_ptr + rows * query_token_stride + heads * query_head_stride + o_d[None, :]
    query = tl.load(p_q, mask=m_q, other=0.0).to(kv_ptr.dtype.element_ty)  # [M, D]

    acc = tl.zeros([M, D], dtype=tl.float32)
    row_max = tl.full([M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([M], dtype=tl.float32)
    newest = tl.minimum(first + TOKENS, seq_len)
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(first + 1 - window, 0)
    start = oldest // N * N
    full = start
    if FULL_TILES:
        full = tl.maximum(first + 1, 0) // N * N
    p_kv = kv_ptr + kv_head * kv_head_stride + o_d[None, :]
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
    p_o = out_ptr + rows * out_token_stride + heads * out_head_stride + o_d[None, :]
    tl.store(p_o, acc.to(out_ptr.dtype.element_ty), mask=m_q)


def prefill_tile(head_dim: int, element_size: int, device_architecture: int) -> PrefillTile:
    """Give the tile chosen for a cache on sm_80, sm_90 or sm_100."""
    return _TILES[device_architecture][_dim_tile(head_dim), element_size]


def tile_tokens(tile: PrefillTile, group: int) -> int:
    """Give the query tokens of a tile where `group` query heads share a KV head."""
    return _rows(tile, group) // group


def prefill_constants(
    head_dim: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    window: bool,
    soft_cap: bool,
    tile: PrefillTile,
) -> dict[str, Any]:
    """Give the compile-time constants and launch options of the prefill kernel for a cache."""
    dim_tile = _dim_tile(head_dim)
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "FULL_TILES": not window and dim_tile * dtype.itemsize < _MASK_ALL_BYTES,
        "PRECISION": dot_precision(dtype),
        "M": _rows(tile, group),
        "N": tile.keys,
        "D": dim_tile,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **FP_FUSION,
    }


def prefill_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    out: Tensor,
    tiles: Tensor,
    *,
    tile: PrefillTile,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Attend from the tiles' tokens of query [T, heads, head_dim] into the same rows of out.

    tiles: int32 [count, 2], the sequence of each and its first token in that sequence's query.
    """
    heads, head_dim = query.shape[1], query.shape[2]
    kv_heads = kv_layer.shape[3]
    constants = prefill_constants(
        head_dim,
        heads // kv_heads,
        kv_layer.shape[2],
        kv_layer.dtype,
        window=window is not None,
        soft_cap=soft_cap is not None,
        tile=tile,
    )
    _prefill_kernel[(kv_heads * tiles.shape[0],)](
        out,
        query,
        kv_layer,
        block_tables,
        seq_lens,
        query_starts,
        tiles,
        scale,
        soft_cap or 1.0,
        window or 0,
        kv_heads,
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


def _rows(tile: PrefillTile, group: int) -> int:
    return max(tile.rows, int(triton.next_power_of_2(group)))
