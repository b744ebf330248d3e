"""Triton: how a step's decodes are shared out among programs, computed on the device.

The number of programs is fixed by the batch's size, so that a captured graph stays right; which
tokens each attends to follows from seq_lens at every run.
"""

# Triton's language has no types for mypy to check.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferq.kernels.triton_pages import FP_FUSION

_STORED_AT_ONCE = 128
_MIN_BATCH_TILE = 256  # sequences are loaded in a power of two, from this on: few compilations


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """How finely decodes are split. Not measured yet."""

    programs_per_processor: int = 4
    """Programs wanted for each multiprocessor: two run at once, and ends should not idle it."""
    min_tokens: int = 256
    """A shorter split is not worth its partial result."""
    grain: int = 128
    """Splits are multiples of this: of the tile of tokens that a program folds at once."""

    @property
    def shortest(self) -> int:
        """Give the shortest split, a multiple of grain."""
        return -(-self.min_tokens // self.grain) * self.grain


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Work items of a step's decodes, and where split sequences leave partial results.

    An item is a range of tokens of one sequence, for all its KV heads; a sequence has as many
    items as its length asks for, one after the other.
    """

    items: Tensor  # int32 [4, W]: sequence (-1: nothing to do), first token, end, whether alone
    starts: Tensor  # int32 [B + 1]: first item of each sequence, then the number of items
    partial: Tensor  # float32 [W, heads, head_dim]
    lse: Tensor  # float32 [W, heads], in units of log2


@triton.jit(
    do_not_specialize=["rows", "items", "window", "kv_heads", "programs", "min_tokens"],
    do_not_specialize_on_alignment=["seq_len_ptr"],
)
def _schedule_kernel(
    item_ptr,
    start_ptr,
    seq_len_ptr,
    rows,
    items,
    window,
    kv_heads,
    programs,
    min_tokens,
    WINDOW: tl.constexpr,
    GRAIN: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """Store the items of one sequence; the program after the last marks the items left over."""
    row = tl.program_id(0)
    o_b = tl.arange(0, B)
    lens = tl.load(seq_len_ptr + o_b, mask=o_b < rows, other=0)
    seen = tl.maximum(lens, 0)
    if WINDOW:
        seen = tl.minimum(seen, window)
    # A program's even share of all tokens: the items are then at most rows + programs / kv_heads.
    share = tl.cdiv(tl.sum(seen.to(tl.int64), 0) * kv_heads, programs).to(tl.int32)
    most = tl.cdiv(tl.maximum(share, min_tokens), GRAIN) * GRAIN
    start = tl.sum(tl.where(o_b < row, tl.cdiv(seen, most), 0), 0)
    tl.store(start_ptr + row, start)

    length = tl.sum(tl.where(o_b == row, lens, 0), 0)
    own = tl.sum(tl.where(o_b == row, seen, 0), 0)
    count = tl.cdiv(own, most)
    # Equal parts; as multiples of GRAIN no longer than `most`, they are still `count` parts.
    size = tl.cdiv(tl.cdiv(own, tl.maximum(count, 1)), GRAIN) * GRAIN
    alone = (count == 1).to(tl.int32)
    sequence = row
    if row == rows:
        count = items - start
        sequence = -1
    for base in range(0, count, C):
        part = base + tl.arange(0, C)
        first = length - own + part * size
        item = start + part
        mask = (part < count) & (item < items)
        tl.store(item_ptr + item, tl.zeros([C], tl.int32) + sequence, mask=mask)
        tl.store(item_ptr + items + item, first, mask=mask)
        tl.store(item_ptr + 2 * items + item, tl.minimum(first + size, length), mask=mask)
        tl.store(item_ptr + 3 * items + item, tl.zeros([C], tl.int32) + alone, mask=mask)


def count_items(
    rows: int, kv_heads: int, longest: int, window: int | None, programs: int, policy: SplitPolicy
) -> int:
    """Give the items that `rows` decodes of at most `longest` tokens can need; rows: no splits."""
    seen = longest if window is None else min(longest, window)
    most = max(1, -(-seen // policy.shortest))
    return min(rows + programs // kv_heads, rows * most)


def splits_any(lens: Sequence[int], kv_heads: int, programs: int, policy: SplitPolicy) -> bool:
    """Tell whether decodes that see so many tokens each are split at all."""
    share = -(-sum(lens) * kv_heads // programs)
    return max(lens) > -(-max(share, policy.shortest) // policy.grain) * policy.grain


def schedule_decodes(
    seq_lens: Tensor,
    items: int,
    heads: tuple[int, int],
    head_dim: int,
    *,
    window: int | None,
    programs: int,
    policy: SplitPolicy,
) -> DecodeWork:
    """Share out the sequences of seq_lens [B] among the items; heads: of queries and of KV."""
    rows = seq_lens.numel()
    work = DecodeWork(
        items=seq_lens.new_empty(4, items, dtype=torch.int32),
        starts=seq_lens.new_empty(rows + 1, dtype=torch.int32),
        partial=seq_lens.new_empty(items, heads[0], head_dim, dtype=torch.float32),
        lse=seq_lens.new_empty(items, heads[0], dtype=torch.float32),
    )
    _schedule_kernel[(rows + 1,)](
        work.items,
        work.starts,
        seq_lens,
        rows,
        items,
        window or 0,
        heads[1],
        programs,
        policy.min_tokens,
        **schedule_constants(rows, policy.grain, window=window is not None),
    )
    return work


def schedule_constants(rows: int, grain: int, *, window: bool) -> dict[str, int]:
    """Give the compile-time constants and launch options of the kernel for a batch."""
    return {
        "WINDOW": window,
        "GRAIN": grain,
        "B": max(_MIN_BATCH_TILE, triton.next_power_of_2(rows)),
        "C": _STORED_AT_ONCE,
        **FP_FUSION,
    }
