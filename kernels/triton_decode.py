"""Triton: paged attention for one query token per sequence, long caches split across programs.

Flash-decoding (Dao et al., 2023): each work item attends to a range of tokens; a second kernel
joins a sequence's items by their log-sum-exp. The query heads of one KV head fill the rows of the
matrix tile.
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
from inferq.kernels.triton_schedule import DecodeWork


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Tile of one program: tokens of the cache folded at once, warps, stages of the pipeline."""

    tokens: int
    warps: int
    stages: int


# Architecture -> (padded head_dim, bytes of a cache element). Not measured yet: chosen so that two
# tiles of keys and values are on their way while one is folded (page numbers come one load earlier,
# which takes five stages), that two programs or more share an sm_90 multiprocessor, and that no
# register is spilled with Triton 3.6 to 3.9. IBM's choice on an H100 is 128 tokens and 8 warps
# (arXiv 2511.11581), but two tiles of that on their way leave room for one program only. What
# stands under sm_80 also runs on consumer devices, where a block has 99 KiB of shared memory.
_TILES = {
    80: {
        (64, 2): DecodeTile(128, 4, 5),
        (128, 2): DecodeTile(64, 8, 5),
        (256, 2): DecodeTile(32, 4, 5),
        (64, 4): DecodeTile(32, 4, 5),
        (128, 4): DecodeTile(32, 8, 5),
        (256, 4): DecodeTile(16, 8, 5),
    },
    90: {
        (64, 2): DecodeTile(128, 4, 5),
        (128, 2): DecodeTile(64, 8, 5),
        (256, 2): DecodeTile(32, 4, 5),
        (64, 4): DecodeTile(32, 4, 5),
        (128, 4): DecodeTile(32, 8, 5),
        (256, 4): DecodeTile(16, 8, 5),
    },
    100: {
        (64, 2): DecodeTile(128, 4, 5),
        (128, 2): DecodeTile(64, 8, 5),
        (256, 2): DecodeTile(32, 4, 5),
        (64, 4): DecodeTile(32, 4, 5),
        (128, 4): DecodeTile(32, 8, 5),
        (256, 4): DecodeTile(16, 8, 5),
    },
}
_MIN_ROWS = 16  # tl.dot's smallest M
_REDUCE_ITEMS = 16  # items joined at once by the reduce kernel. Not measured yet.


# Not specialized: values that change from step to step must not compile the kernel again.
@triton.jit(
    do_not_specialize=["window", "items", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "seq_len_ptr"],
)
def _decode_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_ptr,
    kv_ptr,
    table_ptr,
    seq_len_ptr,
    item_ptr,
    scale,
    soft_cap,
    window,
    items,
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
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    kv_head = tl.program_id(0).to(tl.int64)  # the heads of a token lie together: run them together
    item = tl.program_id(1)
    if SPLIT:
        row = tl.load(item_ptr + item).to(tl.int64)
        if row < 0:
            return
        start = tl.load(item_ptr + items + item)
        end = tl.load(item_ptr + 2 * items + item)
        alone = tl.load(item_ptr + 3 * items + item)
    else:
        row = item.to(tl.int64)
        start = 0
        end = tl.load(seq_len_ptr + row)
        alone = 1
        if WINDOW:
            start = tl.maximum(end - window, 0)

    o_m = tl.arange(0, M)
    o_d = tl.arange(0, D)
    m_q = (o_m < GROUP)[:, None] & (o_d < HEAD_DIM)[None, :]
    # Scalars of 64 bits, offsets inside of a token of 32: fewer registers.
    heads = tl.program_id(0) * GROUP + o_m
    o_q = heads[:, None] * query_head_stride + o_d[None, :]
    p_q = query_ptr + row * query_token_stride + o_q
    query = tl.load(p_q, mask=m_q, other=0.0).to(kv_ptr.dtype.element_ty)  # [M, D]

    acc = tl.zeros([M, D], dtype=tl.float32)
    row_max = tl.full([M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([M], dtype=tl.float32)
    p_table = table_ptr + row * table_stride
    p_kv = kv_ptr + kv_head * kv_head_stride + o_d[None, :]
    for tile in range(start, end, N):
        o_n = tile + tl.arange(0, N)
        m_n = o_n < end
        m_kv = m_n[:, None] & (o_d < HEAD_DIM)[None, :]
        rows = cached_rows(o_n, m_n, p_table, kv_block_stride, kv_token_stride, BLOCK_SIZE)
        key = tl.load(p_kv + rows[:, None], mask=m_kv, other=0.0)  # [N, D]
        value = tl.load(p_kv + kv_part_stride + rows[:, None], mask=m_kv, other=0.0)
        scores = scaled_scores(query, key, scale, soft_cap, SOFT_CAP, PRECISION)
        scores = tl.where(m_n[None, :], scores, float("-inf"))
        acc, row_max, row_sum = softmax_step(acc, row_max, row_sum, scores, value, PRECISION)

    # An empty row has sum 0 and gives zeros.
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if alone == 1:
        p_o = out_ptr + row * out_token_stride + (heads[:, None] * out_head_stride + o_d[None, :])
        tl.store(p_o, acc.to(out_ptr.dtype.element_ty), mask=m_q)
    elif SPLIT:
        first = item.to(tl.int64) * tl.num_programs(0) * GROUP
        tl.store(lse_ptr + first + heads, row_max + tl.log2(row_sum), mask=o_m < GROUP)
        o_p = heads[:, None] * HEAD_DIM + o_d[None, :]
        tl.store(partial_ptr + first * HEAD_DIM + o_p, acc, mask=m_q)


@triton.jit
def _reduce_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    start_ptr,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(start_ptr + row)
    end = tl.load(start_ptr + row + 1)
    if end - first == 1:  # written in full by its only item
        return

    o_d = tl.arange(0, D)
    m_d = o_d < HEAD_DIM
    acc = tl.zeros([D], dtype=tl.float32)
    best = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    for base in range(first, end, S):
        o_s = base + tl.arange(0, S)
        m_s = o_s < end
        o_p = o_s.to(tl.int64) * tl.num_programs(1) + head
        lse = tl.load(lse_ptr + o_p, mask=m_s, other=float("-inf"))
        p_partial = partial_ptr + o_p[:, None] * HEAD_DIM + o_d[None, :]
        partial = tl.load(p_partial, mask=m_s[:, None] & m_d[None, :], other=0.0)  # [S, D]
        new_best = tl.maximum(best, tl.max(lse, 0))
        weights = tl.exp2(lse - new_best)
        rescale = tl.exp2(best - new_best)
        acc = acc * rescale + tl.sum(partial * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        best = new_best
    # A sequence without items is a padding row: zeros.
    acc = acc / tl.where(total == 0.0, 1.0, total)
    p_o = out_ptr + row * out_token_stride + head.to(tl.int64) * out_head_stride + o_d
    tl.store(p_o, acc.to(out_ptr.dtype.element_ty), mask=m_d)


def decode_tile(head_dim: int, element_size: int, device_architecture: int) -> DecodeTile:
    """Give the tile chosen for a cache on sm_80, sm_90 or sm_100."""
    return _TILES[device_architecture][_dim_tile(head_dim), element_size]


def decode_constants(
    head_dim: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    window: bool,
    soft_cap: bool,
    split: bool,
    tile: DecodeTile,
) -> dict[str, Any]:
    """Give the compile-time constants and launch options of the decode kernel for a cache."""
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "SPLIT": split,
        "PRECISION": dot_precision(dtype),
        "M": max(_MIN_ROWS, triton.next_power_of_2(group)),
        "N": tile.tokens,
        "D": _dim_tile(head_dim),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **FP_FUSION,
    }


def reduce_constants(head_dim: int) -> dict[str, Any]:
    """Give the compile-time constants and launch options of the reduce kernel."""
    return {"HEAD_DIM": head_dim, "S": _REDUCE_ITEMS, "D": _dim_tile(head_dim), **FP_FUSION}


def decode_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    work: DecodeWork | None,
    *,
    tile: DecodeTile,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Attend from query [B, heads, head_dim], row i to sequence i, into out of the same shape.

    Without `work` no sequence is split.
    """
    rows, heads, head_dim = query.shape
    kv_heads = kv_layer.shape[3]
    constants = decode_constants(
        head_dim,
        heads // kv_heads,
        kv_layer.shape[2],
        kv_layer.dtype,
        window=window is not None,
        soft_cap=soft_cap is not None,
        split=work is not None,
        tile=tile,
    )
    items = rows if work is None else work.items.shape[1]
    _decode_kernel[(kv_heads, items)](
        out,
        out if work is None else work.partial,
        out if work is None else work.lse,
        query,
        kv_layer,
        block_tables,
        seq_lens,
        seq_lens if work is None else work.items,
        scale,
        soft_cap or 1.0,
        window or 0,
        items,
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
    if work is not None:
        _reduce_kernel[(rows, heads)](
            out,
            work.partial,
            work.lse,
            work.starts,
            out.stride(0),
            out.stride(1),
            **reduce_constants(head_dim),
        )


def _dim_tile(head_dim: int) -> int:
    return max(64, int(triton.next_power_of_2(head_dim)))
