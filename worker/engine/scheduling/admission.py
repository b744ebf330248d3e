"""Which waiting and swapped requests may run, and who gives way to them."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import NamedTuple

from inferq.protocol.errors import ErrorCode, ErrorInfo
from inferq.worker.engine.blocks.block_pool import PrefixMatch
from inferq.worker.engine.blocks.residency import Residency, distinct_blocks
from inferq.worker.engine.requests.group import SequenceGroup
from inferq.worker.engine.requests.sequence import Sequence, SequenceStatus
from inferq.worker.engine.scheduling.draft import Draft
from inferq.worker.engine.scheduling.preemption import Preemption


class Verdict(Enum):
    """Whether a candidate may start: now, once others have freed blocks, or never."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Rejection(NamedTuple):
    """A request that can never run, and why."""

    group: SequenceGroup
    error: ErrorInfo


class Demand(NamedTuple):
    """What a candidate needs to run to the end of its known tokens and one step beyond."""

    #: The sequences that start together.
    sequences: list[Sequence]
    num_slots: int
    #: Free blocks, beyond those in `match`.
    num_blocks: int
    match: PrefixMatch


class Admission:
    """Judges candidates one at a time, in the order in which they are served.

    Swapped requests go before waiting ones, unless these have a better priority. One that does not
    fit is not overtaken by its equals. If it has a better priority than running ones, and these
    giving way is enough, they do.
    """

    def __init__(self, residency: Residency, preemption: Preemption, max_num_seqs: int) -> None:
        self._residency = residency
        self._preemption = preemption
        self._max_num_seqs = max_num_seqs
        #: Blocks left free at admission, so that running sequences can grow before they preempt.
        self._watermark = residency.pool.num_blocks // 100

    def next_candidate(self, draft: Draft, position: int) -> Sequence | None:
        """Return whoever is served next, of the waiting from `position` on; None for nobody."""
        swapped, waiting = self._residency.swapped, self._residency.waiting
        candidate = waiting[position] if position < len(waiting) else None
        if swapped and not (candidate and candidate.priority < swapped.first.priority):
            # blocks never move in both directions in one step
            came_and_went = draft.swap_in and draft.lacks_blocks
            candidate = None if draft.swap_out or came_and_went else swapped.first
        if candidate and draft.lacks_blocks:
            running = self._residency.running
            if not (running and candidate.priority < running.last.priority):
                return None
        return candidate

    def demand(self, candidate: Sequence) -> Demand:
        """Work out what it takes to start a candidate, with all that must start with it."""
        group, pool = candidate.group, self._residency.pool
        if candidate.status is SequenceStatus.SWAPPED:
            sequences = group.with_status(SequenceStatus.SWAPPED)
            slots = sum(s.num_slots for s in sequences)
            return Demand(sequences, slots, self._blocks_of_swapped(sequences), PrefixMatch([], 0))
        match = pool.match_prefix(candidate.prefix_chain, candidate.token_ids, group.hit_limit)
        if group.steps_together:
            sequences, wanted = list(group.sequences), group.num_blocks_wanted
        else:
            sequences = [candidate]
            wanted = candidate.num_tokens // pool.block_size + candidate.num_slots
        slots = sum(s.num_slots for s in sequences)
        return Demand(sequences, slots, wanted - len(match.block_ids), match)

    def judge(self, draft: Draft, candidate: Sequence, demand: Demand) -> Verdict:
        """Judge by the blocks of all known tokens and the next step, not of the first chunk."""
        if self._min_blocks(candidate) > self._residency.pool.num_blocks:
            return Verdict.NEVER
        if not self._residency.running:
            return Verdict.OK
        blocks, slots = self._lacking(draft, demand)
        return Verdict.OK if blocks <= 0 and slots <= 0 else Verdict.LATER

    def make_room(self, draft: Draft, candidate: Sequence, demand: Demand) -> bool:
        """Let running sequences of worse priority give way, the worst first; True if they did.

        Only if that is enough, and only as many as it takes. What came in with this step is not
        among them: candidates come in the order of their priorities.
        """
        victims = self._victims(draft, candidate, demand)
        for victim in victims:
            if victim.status is SequenceStatus.RUNNING:
                self._preemption.give_way(draft, victim, candidate.group)
        return bool(victims)

    def rejection(self, candidate: Sequence) -> Rejection:
        """Say why a candidate can never run."""
        pool = self._residency.pool
        capacity = pool.num_blocks * pool.block_size
        what = f"{candidate.num_tokens} tokens"
        if candidate.group.search is not None:
            what += f" and a block for each of {candidate.num_slots} beams"
        error = ErrorInfo(
            ErrorCode.INVALID_REQUEST,
            f"prompt_token_ids: {what} do not fit the whole KV cache of "
            f"{capacity} tokens ({pool.num_blocks} blocks of {pool.block_size})",
            field="prompt_token_ids",
            limit=str(capacity),
        )
        return Rejection(candidate.group, error)

    def _blocks_of_swapped(self, sequences: list[Sequence]) -> int:
        size = self._residency.pool.block_size
        held = distinct_blocks(s.host_table for s in sequences)
        group = sequences[0].group
        if group.steps_together:
            return max(held, group.num_blocks_wanted)
        for s in sequences:
            missing = s.num_tokens // size + s.num_slots - len(s.host_table)
            held += max(missing, int(group.has_forked))
        return held

    def _min_blocks(self, candidate: Sequence) -> int:
        """Blocks without which a candidate cannot run even alone."""
        group, pool = candidate.group, self._residency.pool
        if group.search is not None and not group.has_started:
            return candidate.num_tokens // pool.block_size + candidate.num_slots
        return pool.blocks_for(candidate.num_tokens)

    def _lacking(self, draft: Draft, demand: Demand) -> tuple[int, int]:
        """Return how many blocks and slots are too few."""
        available = draft.num_free - demand.match.num_free - draft.num_owed - self._watermark
        slots = self._max_num_seqs - self._residency.num_slots
        return demand.num_blocks - available, demand.num_slots - slots

    def _victims(self, draft: Draft, candidate: Sequence, demand: Demand) -> list[Sequence]:
        pool, running = self._residency.pool, self._residency.running
        blocks, slots = self._lacking(draft, demand)
        dropped: Counter[int] = Counter()
        victims: dict[Sequence, None] = {}
        for last in reversed(running):
            if last.priority <= candidate.priority:
                return []
            if last in victims:
                continue
            for victim in self._preemption.companions(last):
                victims[victim] = None
                slots -= victim.num_slots
                blocks -= draft.num_promised(victim) + draft.num_owed_to(victim)
                dropped.update(victim.block_table)
                blocks -= sum(
                    dropped[block] == pool.references(block) and block not in demand.match.block_ids
                    for block in victim.block_table
                )
            if blocks <= 0 and slots <= 0:
                break
        return list(victims)
