"""Who gives way when blocks run out, and by which means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from inferq.worker.engine.blocks.residency import Residency
from inferq.worker.engine.requests.group import SequenceGroup
from inferq.worker.engine.requests.request_events import EventKind, RequestEvents
from inferq.worker.engine.requests.sequence import Sequence, SequenceStatus
from inferq.worker.engine.scheduling.draft import Draft
from inferq.worker.engine.scheduling.plan import RunnerSpeeds


class ForcedPreemption(NamedTuple):
    """A running sequence to preempt although nobody needs its blocks."""

    sequence: Sequence
    by_swap: bool = False


#: Asked before each step with the running sequences, in their order: an artificial disturbance.
PreemptionHook = Callable[[tuple[Sequence, ...]], Iterable[ForcedPreemption]]


class Preemption:
    """Takes the device blocks of running sequences.

    To be computed again, a sequence gives way alone, the beams of a search all together. To the
    host's pool, all running sequences of a request move together: what they share then lies there
    once, and comes back shared, which could not be said if each went on its own while others, who
    hold the shared blocks, end. Siblings therefore make room for each other by recompute only.
    """

    def __init__(
        self,
        residency: Residency,
        mode: str,
        speeds: RunnerSpeeds | None,
        events: RequestEvents | None = None,
    ) -> None:
        self._events = events or RequestEvents()
        self.num_preemptions = 0
        self.num_swaps = 0
        self._residency = residency
        self._mode = mode
        self._speeds = speeds

    def give_way(self, draft: Draft, victim: Sequence, winner: SequenceGroup | None) -> None:
        """Preempt `victim`, and whoever must go with it, in favour of `winner`'s sequences."""
        everyone = victim.group.with_status(SequenceStatus.RUNNING)
        by_swap = victim.group is not winner and self._prefers_swap(everyone)
        self._preempt(draft, victim, everyone, by_swap=by_swap)

    def force(self, draft: Draft, preemptions: Iterable[ForcedPreemption]) -> None:
        """Preempt as asked; by recompute where swapping is impossible."""
        for sequence, by_swap in preemptions:
            if sequence.status is SequenceStatus.RUNNING:
                everyone = sequence.group.with_status(SequenceStatus.RUNNING)
                self._preempt(draft, sequence, everyone, by_swap=by_swap)

    def drop(self, victim: Sequence) -> None:
        """Let a running or swapped sequence, with its companions, be computed again."""
        if victim.group.steps_together:
            victim.group.note_blocks_wanted(self._residency.pool.block_size)
        leaving = self.companions(victim)
        for sequence in leaving:
            self._residency.drop(sequence)
            self.num_preemptions += 1
        self._events.note(EventKind.DROPPED, leaving)

    def companions(self, victim: Sequence) -> SequenceOf[Sequence]:
        """Return the sequences that are computed again together with `victim`, itself included."""
        return victim.group.sequences if victim.group.steps_together else (victim,)

    def _preempt(
        self, draft: Draft, victim: Sequence, everyone: list[Sequence], *, by_swap: bool
    ) -> None:
        # Blocks do not move in and out in one step: the host's free blocks may still be read from.
        by_swap = by_swap and not draft.swap_in and self._fits_host(everyone)
        leaving = everyone if by_swap else list(self.companions(victim))
        for sequence in leaving:
            draft.withdraw(sequence)
        if not by_swap:
            self.drop(victim)
            return
        if victim.group.steps_together:
            victim.group.note_blocks_wanted(self._residency.pool.block_size)
        draft.swap_out += self._residency.swap_out(leaving)
        draft.swapped_out += leaving
        self.num_swaps += len(leaving)
        self.num_preemptions += len(leaving)
        self._events.note(EventKind.SWAPPED, leaving)

    def _fits_host(self, sequences: list[Sequence]) -> bool:
        num_free = self._residency.host.num_free
        return 0 < len({b for s in sequences for b in s.block_table}) <= num_free

    def _prefers_swap(self, sequences: list[Sequence]) -> bool:
        if self._mode != "auto" or self._residency.host.num_blocks == 0:
            return self._mode == "swap"
        if self._speeds is None:
            return False
        size = self._residency.pool.block_size
        tokens_in_block = {
            block: min(size, max(sequence.num_computed_tokens - i * size, 0))
            for sequence in sequences
            for i, block in enumerate(sequence.block_table)
        }
        moved = 2 * len(tokens_in_block) * self._speeds.block_bytes
        swap_s = moved / self._speeds.swap_bytes_per_s
        return swap_s < sum(tokens_in_block.values()) / self._speeds.prefill_tokens_per_s
