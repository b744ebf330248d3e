"""Triton: find where the tokens end that top_k and top_p keep, without sorting them.

Tokens are ranked by the bits of their scores: all are at most 0, so that a smaller magnitude is a
better token. Each row of logits is split over several programs. top_k and top_p each keep a prefix
of the ranking; a search over the bits, four at a time from the highest, finds its end: a key, and
how many of the tokens with this very key are kept, lowest ids first. Sums are integers, so that no
result depends on an order of additions.
"""

# Triton's language has no types for mypy to check.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# As torch computes exp on CUDA: tl.exp is an approximation.
from triton.language.extra.cuda import libdevice

from inferq.kernels.triton_pages import FP_FUSION

# Tokens of one program, and of one tile of it, whatever the architecture. Not measured yet.
SLICE = 4096
_TILE = 512
_WARPS = 4

_MASS_SCALE = tl.constexpr(2.0**40)  # as in inferq.kernels.sampling
_DIGITS = tl.constexpr(16)
NO_KEY = tl.constexpr(0x7FFFFFFF)  # beyond every key, that of minus infinity included
# (lowest bit, bits) of the digit of each pass: a key has 31 bits.
_PASSES = (*((shift, 4) for shift in range(27, 0, -4)), (0, 3))


@triton.jit
def row_of(sample, source_ptr, HAS_SOURCES: tl.constexpr):
    """Give a sample's row of logits."""
    row = sample
    if HAS_SOURCES:
        row = tl.load(source_ptr + sample)
    return row


@triton.jit
def highest_of(highest_ptr, slices, SLICES: tl.constexpr):
    """Give a row's highest logit, from its slices'."""
    o_s = tl.arange(0, SLICES)
    return tl.max(tl.load(highest_ptr + o_s, mask=o_s < slices, other=float("-inf")), 0)


@triton.jit
def scores_of(logit_ptr, tokens, mask, highest, temperature):
    """Give the tile's scores, and the keys that rank them."""
    logits = tl.load(logit_ptr + tokens, mask=mask, other=float("-inf"))
    scores = tl.div_rn(logits - highest, temperature)
    return scores, scores.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _mass(scores, mask):
    """Give exp(scores) in units of 2^-40, and 0 where masked out."""
    return tl.where(mask, libdevice.exp(scores) * _MASS_SCALE, 0.0).to(tl.int64)


@triton.jit
def _narrowed(prefix_ptr, left_ptr, sum_ptr, slices, width, top_p, IS_TOTAL, SLICES: tl.constexpr):
    """Give the prefix of the end's key with one more digit, and what is left to go past it.

    With IS_TOTAL the sums are the whole mass, and what is left is top_p's share of it.
    """
    o_s = tl.arange(0, SLICES)[:, None]
    o_d = tl.arange(0, _DIGITS)
    sums = tl.load(sum_ptr + o_s * _DIGITS + o_d[None, :], mask=o_s < slices, other=0)
    sums = tl.sum(sums, 0)  # [DIGITS]
    left = tl.load(left_ptr)
    if IS_TOTAL:
        share = top_p.to(tl.float64) * tl.sum(sums, 0).to(tl.float64)
        left = share.to(tl.int64)
        left += (left.to(tl.float64) < share).to(tl.int64)
    digit = tl.sum((tl.cumsum(sums, 0) < left).to(tl.int32), 0)
    digit = tl.minimum(digit, _DIGITS - 1)
    left -= tl.sum(tl.where(o_d < digit, sums, 0), 0)
    return (tl.load(prefix_ptr) << width) | digit, left


# Not specialized: what changes from step to step, or from pass to pass, compiles nothing again.
@triton.jit(do_not_specialize=["samples", "slices", "index", "shift", "width"])
def _search_kernel(
    prefix_ptr,
    left_ptr,
    cut_key_ptr,
    cut_left_ptr,
    sum_ptr,
    highest_ptr,
    logit_ptr,
    source_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    least_ptr,
    logit_stride,
    vocab_size,
    samples,
    slices,
    index,
    shift,
    width,
    MASS: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum counts or masses by the next digit of the keys that begin like the end's.

    Passes write in turn to either half of the scratch, [2, S] and [2, S, slices, DIGITS], and read
    what the pass before wrote to the other. A search by mass goes on from one by count.
    """
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + sample)
    top_k, top_p = tl.load(top_k_ptr + sample), tl.load(top_p_ptr + sample)
    is_sought = top_p < 1.0 if MASS else top_k > 0
    if temperature <= 0.0 or not is_sought:
        return
    row = row_of(sample, source_ptr, HAS_SOURCES)
    now = (index % 2) * samples + sample
    before = ((index + 1) % 2) * samples + sample
    cut_key, cut_left = tl.cast(NO_KEY, tl.int32), tl.cast(0, tl.int64)
    is_total = False
    if MASS:
        is_total = index == 1
    if index == 0:
        prefix, left = tl.cast(0, tl.int32), tl.minimum(top_k, vocab_size).to(tl.int64)
        if MASS:  # noqa: SIM102 - a constant, decided when compiling
            if top_k > 0:
                cut_key, cut_left = _narrowed(
                    prefix_ptr + before,
                    left_ptr + before,
                    sum_ptr + before * slices * _DIGITS,
                    slices,
                    3,
                    top_p,
                    False,
                    SLICES,
                )
    else:
        prefix, left = _narrowed(
            prefix_ptr + before,
            left_ptr + before,
            sum_ptr + before * slices * _DIGITS,
            slices,
            4,
            top_p,
            is_total,
            SLICES,
        )
        if MASS:
            cut_key, cut_left = tl.load(cut_key_ptr + sample), tl.load(cut_left_ptr + sample)

    highest = highest_of(highest_ptr + sample * slices, slices, SLICES)
    least = tl.load(least_ptr + sample)
    o_d = tl.arange(0, _DIGITS)
    sums = tl.zeros([_DIGITS], tl.int64)
    digits = (1 << width) - 1
    for first in range(part * SLICE, tl.minimum(part * SLICE + SLICE, vocab_size), TILE):
        tokens = first + tl.arange(0, TILE)
        mask = tokens < vocab_size
        scores, keys = scores_of(logit_ptr + row * logit_stride, tokens, mask, highest, temperature)
        mask = mask & ((keys >> (shift + width)) == prefix)
        if MASS:
            mask = mask & (scores >= least) & (keys < cut_key)
        if tl.max(mask.to(tl.int32), 0) > 0:
            weights = _mass(scores, mask) if MASS else mask.to(tl.int64)
            digit = (keys >> shift) & digits
            by_digit = tl.where(digit[:, None] == o_d[None, :], weights[:, None], 0)
            sums += tl.sum(by_digit, 0)
    if part == 0:
        if MASS:
            # The tokens at top_k's very end count as many times as they are kept.
            score = (cut_key | -0x80000000).to(tl.float32, bitcast=True)
            is_here = (score >= least) & ((cut_key >> (shift + width)) == prefix)
            weight = _mass(score, is_here) * cut_left
            sums += tl.where(o_d == ((cut_key >> shift) & digits), weight, 0)
            tl.store(cut_key_ptr + sample, cut_key)
            tl.store(cut_left_ptr + sample, cut_left)
        tl.store(prefix_ptr + now, prefix)
        tl.store(left_ptr + now, left)
    tl.store(sum_ptr + (now * slices + part) * _DIGITS + o_d, sums)


@triton.jit(do_not_specialize=["samples", "slices"])
def _end_kernel(
    end_key_ptr,
    end_left_ptr,
    equal_ptr,
    prefix_ptr,
    left_ptr,
    sum_ptr,
    highest_ptr,
    logit_ptr,
    source_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    logit_stride,
    vocab_size,
    samples,
    slices,
    HAS_SOURCES: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Settle each row's end, and count the tokens with the end's key in each slice."""
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + sample)
    top_k, top_p = tl.load(top_k_ptr + sample), tl.load(top_p_ptr + sample)
    is_limited = (top_k > 0) | (top_p < 1.0)
    if temperature <= 0.0 or not is_limited:
        return
    row = row_of(sample, source_ptr, HAS_SOURCES)
    before = samples + sample  # the last pass of either search is an odd one
    key, left = _narrowed(
        prefix_ptr + before,
        left_ptr + before,
        sum_ptr + before * slices * _DIGITS,
        slices,
        3,
        top_p,
        False,
        SLICES,
    )
    highest = highest_of(highest_ptr + sample * slices, slices, SLICES)
    equal = tl.zeros([TILE], tl.int32)
    for first in range(part * SLICE, tl.minimum(part * SLICE + SLICE, vocab_size), TILE):
        tokens = first + tl.arange(0, TILE)
        mask = tokens < vocab_size
        _, keys = scores_of(logit_ptr + row * logit_stride, tokens, mask, highest, temperature)
        equal += (mask & (keys == key)).to(tl.int32)
    tl.store(equal_ptr + sample * slices + part, tl.sum(equal, 0))
    if part == 0:
        if top_p < 1.0:
            # What is left is mass: as many tokens as begin below it.
            score = (key | -0x80000000).to(tl.float32, bitcast=True)
            each = tl.maximum(_mass(score, score <= 0.0), 1)
            left = (left + each - 1) // each
        tl.store(end_key_ptr + sample, key)
        tl.store(end_left_ptr + sample, left)


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows of logits [R, vocabulary or more], each split over programs, and who draws from them."""

    logits: Tensor
    sources: Tensor | None
    """int64 [S]: the row of each sample, where it is not the sample's own."""
    temperature: Tensor
    vocab_size: int
    highests: Tensor
    """float32 [S, slices]: each slice's highest logit."""

    @property
    def grid(self) -> tuple[int, int]:
        """Give samples and slices."""
        samples, slices = self.highests.shape
        return samples, slices

    @property
    def sizes(self) -> tuple[int, int]:
        """Give what kernels take to find a row: its stride, and the vocabulary's size."""
        return self.logits.stride(0), self.vocab_size

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Give what kernels take to find a sample's row: the logits and the sources, or any."""
        return self.logits, self.temperature if self.sources is None else self.sources


def row_constants(vocab_size: int, *, has_sources: bool, tile: int) -> dict[str, Any]:
    """Give the compile-time constants and launch options that the kernels over slices share."""
    return {
        "HAS_SOURCES": has_sources,
        "SLICE": SLICE,
        "SLICES": max(2, triton.next_power_of_2(triton.cdiv(vocab_size, SLICE))),
        "TILE": tile,
        "num_warps": _WARPS,
        **FP_FUSION,
    }


def search_constants(vocab_size: int, *, has_sources: bool) -> dict[str, Any]:
    """Give the compile-time constants and launch options of the search's kernels."""
    return row_constants(vocab_size, has_sources=has_sources, tile=_TILE)


@dataclass(frozen=True, slots=True)
class Ends:
    """Where each sample's kept tokens end."""

    keys: Tensor
    """int32 [S]: the last kept token's key."""
    left: Tensor
    """int64 [S]: tokens with this key that are kept, lowest ids first."""
    equals: Tensor
    """int32 [S, slices]: tokens with this key."""


def find_ends(
    rows: SplitRows,
    top_k: Tensor,
    top_p: Tensor,
    least: Tensor,
    *,
    with_top_k: bool,
    with_top_p: bool,
) -> Ends:
    """Find the ends of the samples that have a top_k or top_p; the others' mean nothing.

    `least` [S] is the lowest score that min_p keeps. Says nothing about min_p's own end.
    """
    samples, slices = rows.grid
    device = rows.logits.device
    prefixes = torch.empty(2, samples, dtype=torch.int32, device=device)
    left = torch.empty(2, samples, dtype=torch.int64, device=device)
    cut_keys, cut_left = torch.empty_like(prefixes[0]), torch.empty_like(left[0])
    sums = torch.empty(2, samples, slices, _DIGITS.value, dtype=torch.int64, device=device)
    ends = Ends(
        torch.empty_like(prefixes[0]),
        torch.empty_like(left[0]),
        torch.empty(samples, slices, dtype=torch.int32, device=device),
    )
    constants = search_constants(rows.vocab_size, has_sources=rows.sources is not None)
    state = (prefixes, left)
    limits = (rows.temperature, top_k, top_p)
    for is_mass, index, (shift, width) in _passes(with_top_k=with_top_k, with_top_p=with_top_p):
        _search_kernel[rows.grid](
            *state,
            cut_keys,
            cut_left,
            sums,
            rows.highests,
            *rows.rows,
            *limits,
            least,
            *rows.sizes,
            samples,
            slices,
            index,
            shift,
            width,
            MASS=is_mass,
            **constants,
        )
    _end_kernel[rows.grid](
        ends.keys,
        ends.left,
        ends.equals,
        *state,
        sums,
        rows.highests,
        *rows.rows,
        *limits,
        *rows.sizes,
        samples,
        slices,
        **constants,
    )
    return ends


def _passes(*, with_top_k: bool, with_top_p: bool) -> Iterator[tuple[bool, int, tuple[int, int]]]:
    """Yield the passes of the search by count, then by mass: index, and place of its digit."""
    for is_mass, is_wanted in ((False, with_top_k), (True, with_top_p)):
        if is_wanted:
            for index, place in enumerate(_PASSES):
                yield is_mass, index, place
