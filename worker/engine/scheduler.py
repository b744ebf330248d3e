"""Who computes how many tokens in the next step, and in which blocks."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from enum import Enum
from itertools import chain
from typing import NamedTuple

from inferq.protocol.errors import ErrorCode, ErrorInfo
from inferq.worker.engine.block_pool import BlockPool, PrefixMatch
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.plan import ScheduledSequence, SequenceResult, StepPlan
from inferq.worker.engine.sequence import Sequence, SequenceStatus
from inferq.worker.engine.sequence_queue import SequenceQueue


class Admission(Enum):
    """Whether a waiting sequence may start: now, once others have freed blocks, or never."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Rejection(NamedTuple):
    """A sequence that can never run, and why."""

    sequence: Sequence
    error: ErrorInfo


class Scheduler:
    """Closes the gap between tokens known and tokens computed, under one token budget per step.

    There are no prefill and decode phases: running sequences come first, those with a single token
    to compute before the others so that a long prompt delays nobody's next token, then waiting
    ones, all by `Sequence.order`. Blocks are allocated for the tokens of the step and no sooner. A
    running sequence that finds no free block takes those of the last in order, which is computed
    again later, from its own place in the queue; if it is the last itself it keeps its blocks and
    sits the step out. The first in order always advances, so every sequence ends.

    `pool` must hold the longest sequence; the caller ends those that would outgrow it.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.pool = pool
        self.running = SequenceQueue()
        self.waiting = SequenceQueue()
        self.num_preemptions = 0
        #: Tokens looked up in the prefix cache by sequences that ran for the first time, and found.
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        #: Blocks left free at admission, so that running sequences can grow before they preempt.
        self._watermark = pool.num_blocks // 100

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait for its turn."""
        self.waiting.add(sequence)

    def schedule(self) -> tuple[StepPlan, list[Rejection]]:
        """Plan a step and allocate its blocks; also return what can never run, now ended."""
        draft = _Draft(self._max_num_batched_tokens)
        self._schedule_running(draft)
        rejected = [] if draft.lacks_blocks else self._admit_waiting(draft)
        return draft.plan(), rejected

    def update(self, plan: StepPlan, results: SequenceOf[SequenceResult]) -> None:
        """Record a computed plan and its results."""
        for item, result in zip(plan.scheduled, results, strict=True):
            if item.samples != bool(result.samples):
                raise RuntimeError(f"{item}: the runner gave {result}")
            self._advance(item.sequence, item.num_tokens)
            item.sequence.token_ids.extend(token.token_id for token in result.samples)

    def finish(self, sequence: Sequence) -> None:
        """End a waiting or running sequence; its blocks are free at once."""
        queue = self.running if sequence.status is SequenceStatus.RUNNING else self.waiting
        queue.remove(sequence)
        self._drop_blocks(sequence)
        sequence.status = SequenceStatus.FINISHED

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; it waits, at its own place, to be computed again."""
        self.running.remove(sequence)
        self._drop_blocks(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(sequence)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless blocks and sequences account for each other."""
        self.pool.check_integrity(s.block_table for s in chain(self.running, self.waiting))

    def _schedule_running(self, draft: _Draft) -> None:
        longer: list[Sequence] = []
        # a copy: preemption changes the queue
        for sequence in list(self.running):
            if len(sequence.token_ids) - sequence.num_computed_tokens > 1:
                longer.append(sequence)
            elif sequence.status is SequenceStatus.RUNNING:
                self._schedule_one(draft, sequence)
        for sequence in longer:
            if draft.budget and sequence.status is SequenceStatus.RUNNING:
                self._schedule_one(draft, sequence)

    def _schedule_one(self, draft: _Draft, sequence: Sequence) -> None:
        computed = sequence.num_computed_tokens
        num_tokens = min(len(sequence.token_ids) - computed, draft.budget)
        missing = self.pool.blocks_for(computed + num_tokens) - len(sequence.block_table)
        if missing > 0:
            while missing > self.pool.num_free:
                draft.lacks_blocks = True
                if (victim := self.running.last) is sequence:
                    return
                draft.withdraw(victim)
                self.preempt(victim)
            sequence.block_table += self.pool.allocate(missing)
        draft.add(sequence, num_tokens)

    def _admit_waiting(self, draft: _Draft) -> list[Rejection]:
        rejected: list[Rejection] = []
        while self.waiting and draft.budget and len(self.running) < self._max_num_seqs:
            sequence = self.waiting.first
            match = self.pool.match_prefix(sequence.prefix_chain, sequence.token_ids)
            admission = self._admission(sequence, match)
            if admission is Admission.LATER:
                break
            if admission is Admission.NEVER:
                self.finish(sequence)
                rejected.append(Rejection(sequence, self._never_fits(sequence)))
            else:
                self._start(sequence, match)
                self._schedule_one(draft, sequence)
        return rejected

    def _admission(self, sequence: Sequence, match: PrefixMatch) -> Admission:
        """Judge by the blocks of all known tokens and the next, not of the first chunk alone."""
        blocks_for, known = self.pool.blocks_for, len(sequence.token_ids)
        if blocks_for(known) > self.pool.num_blocks:
            return Admission.NEVER
        if not self.running:
            return Admission.OK
        # No running sequence is owed blocks for tokens it knows: one that did not get all of them
        # scheduled in this step has used up the budget, and then nobody is admitted.
        wanted = blocks_for(known + 1) - len(match.block_ids)
        available = self.pool.num_free - match.num_free - self._watermark
        return Admission.OK if wanted <= available else Admission.LATER

    def _start(self, sequence: Sequence, match: PrefixMatch) -> None:
        num_hit = len(match.block_ids) * self.pool.block_size
        if sequence.num_preemptions == 0:
            self.prefix_query_tokens += len(sequence.token_ids)
            self.prefix_hit_tokens += num_hit
            sequence.num_cached_tokens = min(num_hit, sequence.num_prompt_tokens)
        self.pool.acquire(match.block_ids)
        sequence.block_table = match.block_ids
        sequence.num_computed_tokens = num_hit
        sequence.status = SequenceStatus.RUNNING
        self.waiting.remove(sequence)
        self.running.add(sequence)

    def _advance(self, sequence: Sequence, num_tokens: int) -> None:
        size = self.pool.block_size
        first_full = sequence.num_computed_tokens // size
        sequence.num_computed_tokens += num_tokens
        num_full = sequence.num_computed_tokens // size
        if num_full > first_full and self.pool.enable_prefix_caching:
            sequence.prefix_chain.extend(sequence.token_ids, num_full)
            for i in range(first_full, num_full):
                self.pool.register(sequence.block_table[i], sequence.prefix_chain.links[i])

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []

    def _never_fits(self, sequence: Sequence) -> ErrorInfo:
        capacity = self.pool.num_blocks * self.pool.block_size
        return ErrorInfo(
            ErrorCode.INVALID_REQUEST,
            f"prompt_token_ids: {sequence.num_tokens} tokens do not fit the whole KV cache of "
            f"{capacity} tokens ({self.pool.num_blocks} blocks of {self.pool.block_size})",
            field="prompt_token_ids",
            limit=str(capacity),
        )


class _Draft:
    """A step's plan while it is made, and what is left of its token budget."""

    __slots__ = ("_num_tokens", "budget", "lacks_blocks")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        #: Whether a running sequence had to preempt or sit out: then nobody is admitted.
        self.lacks_blocks = False
        self._num_tokens: dict[Sequence, int] = {}

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        """Plan `num_tokens` of `sequence`."""
        self._num_tokens[sequence] = num_tokens
        self.budget -= num_tokens

    def withdraw(self, sequence: Sequence) -> None:
        """Take `sequence` out, if it is in, and its tokens back into the budget."""
        self.budget += self._num_tokens.pop(sequence, 0)

    def plan(self) -> StepPlan:
        """Return the plan, single tokens first."""
        items = [ScheduledSequence(s, count) for s, count in self._num_tokens.items()]
        items.sort(key=lambda item: item.num_tokens > 1)
        return StepPlan(items)
