"""Triton: write a step's keys and values into the paged cache."""

# Triton's language has no types for mypy to check.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from inferq.kernels.triton_pages import FP_FUSION

# Elements of a tile [heads, head_dim] written by one program. Not measured yet.
_TILE_ELEMENTS = 2048
_WARP_ELEMENTS = 32 * 8  # 16 bytes of a 2-byte type in each lane


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def _kv_write_kernel(
    key_ptr,
    value_ptr,
    kv_ptr,
    slot_ptr,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    kv_block_stride,
    kv_part_stride,
    kv_token_stride,
    kv_head_stride,
    kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    if slot < 0:
        return
    heads = (tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE))[:, None].to(tl.int64)
    dims = tl.arange(0, DIM_TILE)[None, :]
    mask = (heads < kv_heads) & (dims < HEAD_DIM)  # [HEADS_TILE, DIM_TILE]

    key = tl.load(key_ptr + row * key_token_stride + heads * key_head_stride + dims, mask=mask)
    value = tl.load(
        value_ptr + row * value_token_stride + heads * value_head_stride + dims, mask=mask
    )
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    target = kv_ptr + block * kv_block_stride + offset * kv_token_stride
    target += heads * kv_head_stride + dims
    tl.store(target, key.to(kv_ptr.dtype.element_ty), mask=mask)
    tl.store(target + kv_part_stride, value.to(kv_ptr.dtype.element_ty), mask=mask)


def kv_write_constants(kv_heads: int, head_dim: int, block_size: int) -> dict[str, int]:
    """Give the compile-time constants and launch options of the kernel for a cache."""
    dim_tile = triton.next_power_of_2(head_dim)
    heads_tile = min(triton.next_power_of_2(kv_heads), max(1, _TILE_ELEMENTS // dim_tile))
    return {
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "HEADS_TILE": heads_tile,
        "DIM_TILE": dim_tile,
        "num_warps": max(1, min(4, heads_tile * dim_tile // _WARP_ELEMENTS)),
        **FP_FUSION,
    }


def kv_write(key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
    """Store key and value [T, kv_heads, head_dim] at their slots; slot -1 is skipped."""
    if key.stride(-1) != 1 or value.stride(-1) != 1 or kv_layer.stride(-1) != 1:
        raise ValueError("key, value and cache need contiguous heads (last stride 1)")
    tokens, kv_heads, head_dim = key.shape
    if tokens == 0:
        return
    constants = kv_write_constants(kv_heads, head_dim, kv_layer.shape[2])
    _kv_write_kernel[(tokens, triton.cdiv(kv_heads, constants["HEADS_TILE"]))](
        key,
        value,
        kv_layer,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        kv_layer.stride(3),
        kv_heads,
        **constants,
    )
