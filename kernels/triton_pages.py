"""Triton pieces that the paged attention kernels share."""

# Triton's language has no types for mypy to check.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

# Said at every launch: Triton 3.10 changes the default, 3.9 warns of it.
FP_FUSION = {"enable_fp_fusion": True}

_ARCHITECTURES = (100, 90, 80)  # the rows of the tile tables
_CONSUMER = 120  # newer than sm_100, but with the shared memory of the sm_8x consumer devices


def architecture(device: torch.device) -> int:
    """Give the row of the tile tables for a device: 80, 90 or 100."""
    if device.type != "cuda":
        return 90  # the interpreter
    major, minor = torch.cuda.get_device_capability(device)
    capability = 10 * major + minor
    if capability >= _CONSUMER:
        return 80
    return next((found for found in _ARCHITECTURES if capability >= found), 80)


@triton.jit
def cached_rows(
    positions, mask, table_ptr, kv_block_stride, kv_token_stride, BLOCK_SIZE: tl.constexpr
):
    """Give the int64 cache offset of each position: a tile need not match the pages."""
    pages = tl.load(table_ptr + positions // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    return pages * kv_block_stride + (positions % BLOCK_SIZE).to(tl.int64) * kv_token_stride


@triton.jit
def scaled_scores(query, key, scale, soft_cap, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Give query · keyᵀ in units of log2, [M, N] float32, capped if asked for."""
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (1 + exp(2x)): tl has no tanh. An overflow to inf gives 1.
        doubled = tl.exp2(scores * (2.0 * LOG2_E * scale / soft_cap))
        return soft_cap * LOG2_E * (1.0 - 2.0 / (1.0 + doubled))
    return scores * (scale * LOG2_E)


@triton.jit
def softmax_step(acc, row_max, row_sum, scores, value, PRECISION: tl.constexpr):
    """Fold one tile of scores [M, N] and values [N, D] into the running softmax."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that saw no key yet has -inf here, and -inf - -inf is NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
    return acc, new_max, row_sum


def dot_precision(dtype: torch.dtype) -> str:
    """Give tl.dot's input precision for a cache of this dtype; float32 keeps about its accuracy."""
    return "tf32x3" if dtype == torch.float32 else "ieee"
