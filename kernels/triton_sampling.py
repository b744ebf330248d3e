"""Triton: from logits to tokens by Gumbel-max, without a sort, a copy of the logits or a sync.

Each row is split over several programs: one kernel finds the highest logits, one adds noise that
exists in registers only, one joins the slices. Limits are `triton_ranking.py`'s.
"""

# Triton's language has no types for mypy to check.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferq.kernels.triton_gumbel import gumbel_tile
from inferq.kernels.triton_pages import FP_FUSION
from inferq.kernels.triton_ranking import (
    NO_KEY,
    SLICE,
    Ends,
    SplitRows,
    find_ends,
    highest_of,
    row_constants,
    row_of,
    scores_of,
)

# Tokens of one tile of a slice, whatever the architecture. Not measured yet.
_TILE = 512

_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["slices"])
def _highest_kernel(
    highest_ptr,
    token_ptr,
    logit_ptr,
    source_ptr,
    logit_stride,
    vocab_size,
    slices,
    HAS_SOURCES: tl.constexpr,
    SLICE: tl.constexpr,
    TILE: tl.constexpr,
):
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = row_of(sample, source_ptr, HAS_SOURCES)
    best = tl.full([TILE], float("-inf"), tl.float32)
    ids = tl.full([TILE], _NO_TOKEN, tl.int32)
    is_nan = tl.zeros([TILE], tl.int32)
    for first in range(part * SLICE, tl.minimum(part * SLICE + SLICE, vocab_size), TILE):
        tokens = first + tl.arange(0, TILE)
        mask = tokens < vocab_size
        logits = tl.load(logit_ptr + row * logit_stride + tokens, mask=mask, other=float("-inf"))
        is_nan |= (logits != logits).to(tl.int32)
        ids = tl.where(logits > best, tokens, ids)
        best = tl.where(logits > best, logits, best)
    highest = tl.max(best, 0)
    token = tl.min(tl.where(best == highest, ids, _NO_TOKEN), 0)
    place = sample * slices + part
    # A NaN hides in no maximum.
    tl.store(highest_ptr + place, tl.where(tl.max(is_nan, 0) > 0, float("nan"), highest))
    tl.store(token_ptr + place, token)


@triton.jit(do_not_specialize=["slices"])
def _draw_kernel(
    noisy_ptr,
    score_ptr,
    token_ptr,
    end_key_ptr,
    end_left_ptr,
    equal_ptr,
    highest_ptr,
    logit_ptr,
    source_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    least_ptr,
    seed_ptr,
    child_ptr,
    position_ptr,
    logit_stride,
    vocab_size,
    slices,
    LIMITS: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add noise to what is kept, and give the slice's best token."""
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + sample)
    if temperature <= 0.0:
        return
    row = row_of(sample, source_ptr, HAS_SOURCES)
    highest = highest_of(highest_ptr + sample * slices, slices, SLICES)
    least = tl.load(least_ptr + sample)
    seed, child = tl.load(seed_ptr + sample), tl.load(child_ptr + sample)
    position = tl.load(position_ptr + sample)
    is_limited = False
    end_key, end_left, passed = tl.cast(NO_KEY, tl.int32), tl.cast(0, tl.int64), 0
    if LIMITS:
        is_limited = (tl.load(top_k_ptr + sample) > 0) | (tl.load(top_p_ptr + sample) < 1.0)
        if is_limited:
            end_key, end_left = tl.load(end_key_ptr + sample), tl.load(end_left_ptr + sample)
            o_s = tl.arange(0, SLICES)
            passed = tl.sum(tl.load(equal_ptr + sample * slices + o_s, mask=o_s < part, other=0), 0)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_scores = tl.full([TILE], float("-inf"), tl.float32)
    ids = tl.full([TILE], _NO_TOKEN, tl.int32)
    for first in range(part * SLICE, tl.minimum(part * SLICE + SLICE, vocab_size), TILE):
        tokens = first + tl.arange(0, TILE)
        mask = tokens < vocab_size
        scores, keys = scores_of(logit_ptr + row * logit_stride, tokens, mask, highest, temperature)
        kept = mask & (scores >= least)
        if LIMITS:
            equal = (mask & (keys == end_key)).to(tl.int32)
            rank = passed + tl.cumsum(equal, 0)  # from 1
            kept = kept & ((keys < end_key) | ((equal > 0) & (rank <= end_left)))
            passed += tl.sum(equal, 0)
        if tl.max(kept.to(tl.int32), 0) > 0:
            noisy = scores + gumbel_tile(seed, child, position, first, TILE)
            noisy = tl.where(kept, noisy, float("-inf"))
            # Equals: where there are limits the better score wins, then the lower id.
            ranks = tl.where(is_limited, scores, 0.0)
            better = (noisy > best) | ((noisy == best) & (ranks > best_scores))
            better = better & kept
            ids = tl.where(better, tokens, ids)
            best_scores = tl.where(better, ranks, best_scores)
            best = tl.where(better, noisy, best)
    noisy, score, token = _best_of(best, best_scores, ids)
    place = sample * slices + part
    tl.store(noisy_ptr + place, noisy)
    tl.store(score_ptr + place, score)
    tl.store(token_ptr + place, token)


@triton.jit
def _best_of(noisy, scores, ids):
    """Give the highest noisy score, of equals the highest score, of these the lowest id."""
    best = tl.max(noisy, 0)
    score = tl.max(tl.where(noisy == best, scores, float("-inf")), 0)
    is_best = (noisy == best) & (scores == score)
    return best, score, tl.min(tl.where(is_best, ids, _NO_TOKEN), 0)


@triton.jit(do_not_specialize=["slices"])
def _choose_kernel(
    out_ptr,
    row_highest_ptr,
    highest_ptr,
    greedy_ptr,
    noisy_ptr,
    score_ptr,
    token_ptr,
    temperature_ptr,
    vocab_size,
    slices,
    SLICES: tl.constexpr,
):
    """Join the slices of each row."""
    sample = tl.program_id(0).to(tl.int64)
    o_s = tl.arange(0, SLICES)
    mask = o_s < slices
    place = sample * slices + o_s
    highests = tl.load(highest_ptr + place, mask=mask, other=float("-inf"))
    is_broken = tl.max((highests != highests).to(tl.int32), 0) > 0
    highest = tl.max(highests, 0)
    tl.store(row_highest_ptr + sample, tl.where(is_broken, float("nan"), highest))
    if tl.load(temperature_ptr + sample) <= 0.0:
        ids = tl.load(greedy_ptr + place, mask=mask, other=_NO_TOKEN)
        token = tl.min(tl.where(highests == highest, ids, _NO_TOKEN), 0)
    else:
        noisy = tl.load(noisy_ptr + place, mask=mask, other=float("-inf"))
        scores = tl.load(score_ptr + place, mask=mask, other=float("-inf"))
        ids = tl.load(token_ptr + place, mask=mask, other=_NO_TOKEN)
        _, _, token = _best_of(noisy, scores, ids)
    # A row without a usable maximum gives some token of the vocabulary.
    tl.store(out_ptr + sample, tl.minimum(token, vocab_size - 1).to(tl.int64))


def slice_constants(vocab_size: int, *, has_sources: bool) -> dict[str, Any]:
    """Give the compile-time constants and launch options of the kernels over slices."""
    return row_constants(vocab_size, has_sources=has_sources, tile=_TILE)


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    child: Tensor,
    position: Tensor,
    vocab_size: int,
    *,
    sources: Tensor | None = None,
    with_draws: bool = True,
    with_top_k: bool = True,
    with_top_p: bool = True,
) -> tuple[Tensor, Tensor]:
    """Give the tokens int64 [S], and their rows' highest logits float32 [S], NaN if one is NaN.

    The contract is that of `sampling.sample_tokens`.
    """
    samples, device = temperature.shape[0], logits.device
    token_ids = torch.empty(samples, dtype=torch.int64, device=device)
    highest = torch.empty(samples, dtype=torch.float32, device=device)
    if samples == 0:
        return token_ids, highest
    slices = triton.cdiv(vocab_size, SLICE)
    highests = torch.empty(samples, slices, dtype=torch.float32, device=device)
    greedy = torch.empty(samples, slices, dtype=torch.int32, device=device)
    rows = SplitRows(logits, sources, temperature, vocab_size, highests)
    constants = slice_constants(vocab_size, has_sources=sources is not None)
    tiling = {name: value for name, value in constants.items() if name != "SLICES"}
    _highest_kernel[rows.grid](highests, greedy, *rows.rows, *rows.sizes, slices, **tiling)
    best = (highests, highests, greedy)  # not read where nothing is drawn
    if with_draws:
        least = min_p.log()
        ends = None
        if with_top_k or with_top_p:
            ends = find_ends(
                rows, top_k, top_p, least, with_top_k=with_top_k, with_top_p=with_top_p
            )
        best = _draw(rows, ends, (top_k, top_p, least, seed, child, position), constants)
    _choose_kernel[(samples,)](
        token_ids,
        highest,
        highests,
        greedy,
        *best,
        temperature,
        vocab_size,
        slices,
        SLICES=constants["SLICES"],
        **FP_FUSION,
    )
    return token_ids, highest


def _draw(
    rows: SplitRows, ends: Ends | None, params: tuple[Tensor, ...], constants: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Give each slice's best token: its noisy score, its score and its id."""
    noisy, scores = torch.empty_like(rows.highests), torch.empty_like(rows.highests)
    ids = torch.empty(rows.grid, dtype=torch.int32, device=noisy.device)
    limits = (ids, ids, ids) if ends is None else (ends.keys, ends.left, ends.equals)
    _draw_kernel[rows.grid](
        noisy,
        scores,
        ids,
        *limits,
        rows.highests,
        *rows.rows,
        rows.temperature,
        *params,
        *rows.sizes,
        rows.grid[1],
        LIMITS=ends is not None,
        **constants,
    )
    return noisy, scores, ids
