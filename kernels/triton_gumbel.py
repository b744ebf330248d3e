"""Triton: Gumbel noise from a counter, in registers, or stored for the whole vocabulary."""

# Triton's language has no types for mypy to check.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

# CUDA's own log and exp, as torch uses them: tl.log has an absolute error of 2^-22 near 1, where
# the largest noise comes from.
from triton.language.extra.cuda import libdevice

from inferq.kernels.triton_pages import FP_FUSION

# Tokens of one program, whatever the architecture. Not measured yet.
_TILE = 1024
_WARPS = 4


@triton.jit
def gumbel_tile(seed, child, position, first_token, TILE: tl.constexpr):
    """Give the noise [TILE] of the tokens from first_token on, a multiple of 4."""
    counters = first_token // 4 + tl.arange(0, TILE // 4)
    c1, c2 = position.to(tl.int32), child.to(tl.int32)  # their low halves count
    w0, w1, w2, w3 = tl.philox(seed, counters, c1, c2, tl.zeros([TILE // 4], tl.int32))
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [TILE // 4, 2, 2]: a counter's in order
    return _to_gumbel(tl.reshape(words, [TILE]))


@triton.jit
def _to_gumbel(words):
    # Exact in float32, never 0 or 1: see inferq.kernels.gumbel.
    uniform = ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -libdevice.log(-libdevice.log(uniform))


@triton.jit
def _vocabulary_kernel(
    out_ptr, seed_ptr, child_ptr, position_ptr, vocab_size, out_stride, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    seed = tl.load(seed_ptr + row)
    noise = gumbel_tile(seed, tl.load(child_ptr + row), tl.load(position_ptr + row), first, TILE)
    tokens = first + tl.arange(0, TILE)
    tl.store(out_ptr + row * out_stride + tokens, noise, mask=tokens < vocab_size)


@triton.jit(do_not_specialize=["count"])
def _tokens_kernel(
    out_ptr, seed_ptr, child_ptr, position_ptr, token_ptr, count, token_stride, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    o_t = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = o_t < count
    tokens = tl.load(token_ptr + row * token_stride + o_t, mask=mask, other=0)
    c1 = tl.load(position_ptr + row).to(tl.int32)
    c2 = tl.load(child_ptr + row).to(tl.int32)
    counters = (tokens // 4).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(
        tl.load(seed_ptr + row), counters, c1, c2, tl.zeros([TILE], tl.int32)
    )
    lane = tokens % 4
    words = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    tl.store(out_ptr + row * count + o_t, _to_gumbel(words), mask=mask)


def vocabulary_noise(seeds: Tensor, children: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Draw float32 noise [B, vocab_size] for every token of rows with int64 keys [B]."""
    # Rows start at multiples of 16 bytes, for wide stores.
    stride = -(-vocab_size // 4) * 4
    noise = torch.empty(seeds.shape[0], stride, dtype=torch.float32, device=seeds.device)
    if noise.numel():
        _vocabulary_kernel[(seeds.shape[0], triton.cdiv(vocab_size, _TILE))](
            noise,
            seeds,
            children,
            positions,
            vocab_size,
            stride,
            TILE=_TILE,
            num_warps=_WARPS,
            **FP_FUSION,
        )
    return noise[:, :vocab_size]


def token_noise(seeds: Tensor, children: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Draw float32 noise for token_ids int64 [B, K]."""
    rows, count = token_ids.shape
    token_ids = token_ids.contiguous()
    noise = torch.empty(rows, count, dtype=torch.float32, device=token_ids.device)
    if noise.numel():
        _tokens_kernel[(rows, triton.cdiv(count, _TILE))](
            noise,
            seeds,
            children,
            positions,
            token_ids,
            count,
            count,
            TILE=_TILE,
            num_warps=_WARPS,
            **FP_FUSION,
        )
    return noise
