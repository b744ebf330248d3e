"""Triton: paged attention for one query token per sequence, its cache split across programs.

Flash-decoding (Dao et al., 2023): each split attends to a range of tokens; a second kernel joins
the splits by their log-sum-exp. The query heads of one KV head fill the rows of the matrix tile.
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

# (padded head_dim, bytes of a cache element) -> (tokens in a tile, warps, stages). Not measured
# yet; 128 tokens and 8 warps are IBM's choice for decodes on an H100 (arXiv 2511.11581).
_TILES = {
    (64, 2): (128, 4, 3),
    (128, 2): (128, 8, 2),
    (256, 2): (64, 8, 2),
    (64, 4): (64, 4, 2),
    (128, 4): (32, 4, 2),
    (256, 4): (16, 8, 2),
}
_MIN_ROWS = 16  # tl.dot's smallest M
_REDUCE_SPLITS = 16  # splits joined at once by the reduce kernel. Not measured yet.


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """How the decodes' caches are split: a sequence has ceil(its tokens / tokens) splits."""

    tokens: int
    most: int  # splits of the longest sequence: the grid's size


# Not specialized: values that change from step to step must not compile the kernel again.
@triton.jit(do_not_specialize=["window", "table_stride"])
def _decode_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    query_ptr,
    kv_ptr,
    table_ptr,
    seq_len_ptr,
    scale,
    soft_cap,
    window,
    split_tokens,
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
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    seq_len = tl.load(seq_len_ptr + row)
    first = 0
    if WINDOW:
        first = tl.maximum(seq_len - window, 0)
    start = first + split * split_tokens
    end = tl.minimum(start + split_tokens, seq_len)
    if SPLIT:  # noqa: SIM102 - a constant, decided when compiling
        if start >= seq_len:
            return

    o_m = tl.arange(0, M)
    o_d = tl.arange(0, D)
    m_q = (o_m < GROUP)[:, None] & (o_d < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + o_m
    p_q = query_ptr + row * query_token_stride + heads[:, None] * query_head_stride + o_d[None, :]
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
    if SPLIT:
        splits = tl.num_programs(2)
        o_p = (row * tl.num_programs(1) * GROUP + heads) * splits + split
        tl.store(lse_ptr + o_p, row_max + tl.log2(row_sum), mask=o_m < GROUP)
        tl.store(partial_ptr + o_p[:, None] * HEAD_DIM + o_d[None, :], acc, mask=m_q)
    else:
        p_o = out_ptr + row * out_token_stride + heads[:, None] * out_head_stride + o_d[None, :]
        tl.store(p_o, acc.to(out_ptr.dtype.element_ty), mask=m_q)


@triton.jit(do_not_specialize=["window", "splits"])
def _reduce_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    seq_len_ptr,
    window,
    split_tokens,
    splits,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.load(seq_len_ptr + row)
    if WINDOW:
        tokens = tl.minimum(tokens, window)
    used = tl.cdiv(tokens, split_tokens)

    o_d = tl.arange(0, D)
    m_d = o_d < HEAD_DIM
    base = (row * tl.num_programs(1) + head) * splits
    acc = tl.zeros([D], dtype=tl.float32)
    best = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    for first in range(0, used, S):
        o_s = first + tl.arange(0, S)
        m_s = o_s < used
        lse = tl.load(lse_ptr + base + o_s, mask=m_s, other=float("-inf"))
        p_partial = partial_ptr + (base + o_s)[:, None] * HEAD_DIM + o_d[None, :]
        partial = tl.load(p_partial, mask=m_s[:, None] & m_d[None, :], other=0.0)  # [S, D]
        new_best = tl.maximum(best, tl.max(lse, 0))
        weights = tl.exp2(lse - new_best)
        rescale = tl.exp2(best - new_best)
        acc = acc * rescale + tl.sum(partial * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        best = new_best
    acc = acc / tl.where(total == 0.0, 1.0, total)
    p_o = out_ptr + row * out_token_stride + head * out_head_stride + o_d
    tl.store(p_o, acc.to(out_ptr.dtype.element_ty), mask=m_d)


def decode_constants(
    head_dim: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    window: bool,
    soft_cap: bool,
    split: bool,
) -> dict[str, Any]:
    """Give the compile-time constants and launch options of the decode kernel for a cache."""
    dim_tile = max(64, triton.next_power_of_2(head_dim))
    tokens, warps, stages = _TILES[dim_tile, dtype.itemsize]
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "WINDOW": window,
        "SOFT_CAP": soft_cap,
        "SPLIT": split,
        "PRECISION": dot_precision(dtype),
        "M": max(_MIN_ROWS, triton.next_power_of_2(group)),
        "N": tokens,
        "D": dim_tile,
        "num_warps": warps,
        "num_stages": stages,
        **FP_FUSION,
    }


def decode_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    splits: DecodeSplits,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Attend from query [B, heads, head_dim], row i to sequence i, into out of the same shape."""
    rows, heads, head_dim = query.shape
    constants = decode_constants(
        head_dim,
        heads // kv_layer.shape[3],
        kv_layer.shape[2],
        kv_layer.dtype,
        window=window is not None,
        soft_cap=soft_cap is not None,
        split=splits.most > 1,
    )
    partial, lse = out, out
    if constants["SPLIT"]:
        partial = query.new_empty(rows, heads, splits.most, head_dim, dtype=torch.float32)
        lse = query.new_empty(rows, heads, splits.most, dtype=torch.float32)
    _decode_kernel[(rows, kv_layer.shape[3], splits.most)](
        out,
        partial,
        lse,
        query,
        kv_layer,
        block_tables,
        seq_lens,
        scale,
        soft_cap or 1.0,
        window or 0,
        splits.tokens,
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
    if constants["SPLIT"]:
        _reduce_kernel[(rows, heads)](
            out,
            partial,
            lse,
            seq_lens,
            window or 0,
            splits.tokens,
            splits.most,
            out.stride(0),
            out.stride(1),
            HEAD_DIM=head_dim,
            WINDOW=window is not None,
            S=_REDUCE_SPLITS,
            D=constants["D"],
            **FP_FUSION,
        )
