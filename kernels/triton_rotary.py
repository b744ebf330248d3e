"""Triton: rotary position embedding, in place, on views of the fused projection."""

# Triton's language has no types for mypy to check.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from inferq.kernels.triton_pages import FP_FUSION

# Pairs rotated by one program, whatever the head size and the architecture. Not measured yet.
_TILE_PAIRS = 1024
_WARP_PAIRS = 32 * 8  # 16 bytes of a 2-byte type in each lane, from either half


@triton.jit
def _rotary_kernel(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    heads,
    kv_heads,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    angle_stride,
    HALF: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, HALF_TILE)
    m_p = o_p < HALF
    p_angle = token * angle_stride + o_p
    cosine = tl.load(cos_ptr + p_angle, mask=m_p, other=0.0)[None, :]
    sine = tl.load(sin_ptr + p_angle, mask=m_p, other=0.0)[None, :]
    o_h = (tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)).to(tl.int64)[:, None]
    # Heads beyond the query's are the key's: a tile may hold both.
    mask = (o_h < heads) & m_p[None, :]
    p_query = query_ptr + token * query_token_stride + o_h * query_head_stride + o_p[None, :]
    _rotate(p_query, cosine, sine, mask, HALF)
    o_k = o_h - heads
    mask = (o_k >= 0) & (o_k < kv_heads) & m_p[None, :]
    p_key = key_ptr + token * key_token_stride + o_k * key_head_stride + o_p[None, :]
    _rotate(p_key, cosine, sine, mask, HALF)


@triton.jit
def _rotate(pointers, cosine, sine, mask, HALF: tl.constexpr):
    """Rotate pairs [heads, pairs] whose halves lie HALF elements apart."""
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = pointers.dtype.element_ty
    tl.store(pointers, (first * cosine - second * sine).to(dtype), mask=mask)
    tl.store(pointers + HALF, (second * cosine + first * sine).to(dtype), mask=mask)


def rotary_constants(half: int, heads: int) -> dict[str, Any]:
    """Give the compile-time constants and launch options of the kernel.

    `heads` are those of query and key together.
    """
    half_tile = triton.next_power_of_2(half)
    heads_tile = min(triton.next_power_of_2(heads), max(1, _TILE_PAIRS // half_tile))
    return {
        "HALF": half,
        "HEADS_TILE": heads_tile,
        "HALF_TILE": half_tile,
        "num_warps": max(1, min(4, heads_tile * half_tile // _WARP_PAIRS)),
        **FP_FUSION,
    }


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query and key [T, heads, head_dim] in place by the rows' angles [T, rotary_dim / 2].

    Channel i is paired with i + rotary_dim / 2; channels from rotary_dim on stay as they are.
    Computed in float32.
    """
    tokens, heads, head_dim = query.shape
    half = cos.shape[1]
    if 2 * half > head_dim:
        raise ValueError(f"rotary_dim {2 * half} is more than head_dim {head_dim}")
    if query.stride(-1) != 1 or key.stride(-1) != 1:
        raise ValueError("query and key need contiguous heads (last stride 1)")
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        raise ValueError(f"cos {cos.stride()} and sin {sin.stride()} must be laid out alike")
    if tokens:
        constants = rotary_constants(half, heads + key.shape[1])
        _rotary_kernel[(tokens, triton.cdiv(heads + key.shape[1], constants["HEADS_TILE"]))](
            query,
            key,
            cos,
            sin,
            heads,
            key.shape[1],
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            cos.stride(0),
            **constants,
        )
    return query, key
