"""A step's plan while it is made."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from inferq.worker.engine.blocks.block_pool import BlockPool
from inferq.worker.engine.requests.sequence import Sequence
from inferq.worker.engine.scheduling.plan import BlockCopy, ScheduledSequence, StepPlan


class Part(NamedTuple):
    """Tokens of a sequence to compute, and the free blocks that this takes."""

    sequence: Sequence
    num_tokens: int
    num_blocks: int
    #: The block that others read as well, so that it is copied before the sequence writes.
    shared_block: int | None


class Draft:
    """Who is in the plan, what is left of the token budget, and which free blocks are promised.

    Blocks are counted while it is decided who runs, and taken in `settle`, when nobody gives way
    any more: so no decision needs to be undone, and no block that is read from in this step's
    copies is given to another.
    """

    def __init__(self, pool: BlockPool, budget: int) -> None:
        self.budget = budget
        #: Whether a running sequence had to preempt or sit out: its equals are not admitted then.
        self.lacks_blocks = False
        #: Blocks owed to running sequences for tokens they know, beyond this step.
        self.num_owed = 0
        self.swap_out: list[BlockCopy] = []
        self.swap_in: list[BlockCopy] = []
        #: Whose KV `swap_out`, `swap_in` and `block_copies` move.
        self.swapped_out: list[Sequence] = []
        self.swapped_in: list[Sequence] = []
        self.copied: list[Sequence] = []
        self._pool = pool
        self._num_tokens: dict[Sequence, int] = {}
        self._parts: dict[Sequence, Part] = {}
        self._num_promised = 0
        self._owed: dict[Sequence, int] = {}
        #: How many parts in the plan will leave a shared block for a copy of their own.
        self._leaving: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        """Free blocks that are not promised."""
        return self._pool.num_free - self._num_promised

    def num_promised(self, sequence: Sequence) -> int:
        """Free blocks promised to `sequence`."""
        part = self._parts.get(sequence)
        return 0 if part is None else part.num_blocks

    def num_owed_to(self, sequence: Sequence) -> int:
        """Of the blocks owed, those of `sequence`."""
        return self._owed.get(sequence, 0)

    def owe(self, sequence: Sequence, num_blocks: int) -> None:
        """Note how many blocks a running sequence will need after this step."""
        num_blocks = max(num_blocks, 0)
        self.num_owed += num_blocks - self._owed.get(sequence, 0)
        self._owed[sequence] = num_blocks

    def measure(self, wanted: list[tuple[Sequence, int]]) -> list[Part]:
        """Return what it takes to compute so many tokens of these sequences together."""
        parts: list[Part] = []
        leaving: Counter[int] = Counter()
        size = self._pool.block_size
        for sequence, num_tokens in wanted:
            computed, table = sequence.num_computed_tokens, sequence.block_table
            missing = max(-(-(computed + num_tokens) // size) - len(table), 0)
            shared = None
            if sequence.group.has_forked and computed // size < len(table):
                block = table[computed // size]
                others = self._leaving[block] + leaving[block]
                if self._pool.references(block) - others > 1:
                    shared = block
                    leaving[block] += 1
            parts.append(Part(sequence, num_tokens, missing + (shared is not None), shared))
        return parts

    def add(self, part: Part) -> None:
        """Plan a part as it was measured just before."""
        sequence = part.sequence
        self._num_tokens[sequence] = part.num_tokens
        self.budget -= part.num_tokens
        if part.num_blocks:
            self._parts[sequence] = part
            self._num_promised += part.num_blocks
        if part.shared_block is not None:
            self._leaving[part.shared_block] += 1

    def add_in_place(self, sequence: Sequence, num_tokens: int) -> None:
        """Plan tokens that the sequence's own blocks have room for."""
        self._num_tokens[sequence] = num_tokens
        self.budget -= num_tokens

    def limit_prompts(self, num_tokens: int) -> None:
        """Let what is planned from now on be at most so many tokens, if anything is planned yet."""
        if self._num_tokens:
            self.budget = min(self.budget, num_tokens)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence that is losing its blocks out of the plan, if it is in."""
        self.budget += self._num_tokens.pop(sequence, 0)
        self.num_owed -= self._owed.pop(sequence, 0)
        if part := self._parts.pop(sequence, None):
            self._num_promised -= part.num_blocks
            if part.shared_block is not None:
                self._leaving[part.shared_block] -= 1

    def settle(self) -> StepPlan:
        """Take the blocks and return the plan, single tokens first."""
        copies: list[BlockCopy] = []
        for part in self._parts.values():
            self._take_blocks(part, copies)
        items = [
            ScheduledSequence(sequence, num_tokens)
            for sequence, num_tokens in self._num_tokens.items()
        ]
        for item in items:
            if search := item.sequence.group.search:
                item.num_candidates = search.num_candidates
            elif item.sequence.pending_children and item.samples:
                item.children = item.sequence.pending_children
        items.sort(key=_is_longer)
        return StepPlan(items, self.swap_out, self.swap_in, copies)

    def _take_blocks(self, part: Part, copies: list[BlockCopy]) -> None:
        pool, sequence = self._pool, part.sequence
        table, first = sequence.block_table, sequence.num_computed_tokens // pool.block_size
        # the last of those that share a block finds itself alone and writes in place
        if part.shared_block is not None and pool.references(part.shared_block) > 1:
            (target,) = pool.allocate(1)
            copies.append(BlockCopy(part.shared_block, target))
            self.copied.append(sequence)
            pool.release((part.shared_block,))
            table[first] = target
        missing = pool.blocks_for(sequence.num_computed_tokens + part.num_tokens) - len(table)
        if missing > 0:
            table += pool.allocate(missing)


def _is_longer(item: ScheduledSequence) -> bool:
    return item.num_tokens > 1
