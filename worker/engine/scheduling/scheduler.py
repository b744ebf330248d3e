"""Who computes how many tokens in the next step, and in which blocks."""

from __future__ import annotations

from typing import Final

from inferq.worker.engine.blocks.block_pool import BlockPool
from inferq.worker.engine.blocks.host_pool import HostPool
from inferq.worker.engine.blocks.residency import Residency, distinct_blocks
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.requests.group import SequenceGroup
from inferq.worker.engine.requests.request_events import EventKind, RequestEvents
from inferq.worker.engine.requests.sequence import Sequence, SequenceStatus
from inferq.worker.engine.scheduling.admission import Admission, Demand, Rejection, Verdict
from inferq.worker.engine.scheduling.draft import Draft
from inferq.worker.engine.scheduling.plan import RunnerSpeeds, ScheduledSequence, StepPlan
from inferq.worker.engine.scheduling.preemption import Preemption, PreemptionHook
from inferq.worker.engine.scheduling.prompt_limit import PromptLimit

#: Every so many prompts at hand, a step beside decodes may take another share.
PROMPTS_PER_SHARE: Final = 2


class Scheduler:
    """Closes the gap between tokens known and tokens computed, under one token budget per step.

    There are no prefill and decode phases: running sequences come first, those with a single token
    to compute before the others so that a long prompt delays nobody's next token, then candidates
    for admission, all by `Sequence.order`; a candidate with a better priority than a running prompt
    is admitted before that gets its tokens. Blocks are promised for the tokens of the step and no
    sooner. A running sequence that finds no free block takes those of the last in order; if it is
    the last itself it keeps its blocks and sits the step out. The first in order always advances,
    so every sequence ends.

    The beams of a search are one unit here: all of them step, or none. After they were preempted
    by recompute, each is computed up to its last token but one before they step again, so that
    what they share is computed once and found in the prefix cache by the others.

    Of prompts at most `prompt_limit` tokens are computed in a step beside single tokens, which wait
    for all of it; more when many prompts wait, for whom small steps would be a detour.

    `pool` must hold the longest sequence, and each search one more step; the caller ends those that
    would outgrow it.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        host: HostPool,
        *,
        speeds: RunnerSpeeds | None = None,
        preemption_hook: PreemptionHook | None = None,
        prompt_limit: PromptLimit | None = None,
    ) -> None:
        self.residency = Residency(pool, host)
        self.events = RequestEvents()
        self.preemption = Preemption(self.residency, config.preemption_mode, speeds, self.events)
        #: Tokens looked up in the prefix cache by requests that ran for the first time, and found.
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._pool = pool
        self._running = self.residency.running
        self._admission = Admission(self.residency, self.preemption, config.max_num_seqs)
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._max_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._prompt_limit = prompt_limit
        self._preemption_hook = preemption_hook
        self._draft = Draft(pool, 0)

    def add(self, group: SequenceGroup) -> None:
        """Let a new request's sequences wait for their turn."""
        for sequence in group.sequences:
            self.residency.waiting.add(sequence)

    def schedule(self) -> tuple[StepPlan, list[Rejection]]:
        """Plan a step and take its blocks; also return what can never run, now ended."""
        draft = self._draft = Draft(self._pool, self._max_num_batched_tokens)
        rejected: list[Rejection] = []
        if self._preemption_hook is not None:
            self.preemption.force(draft, self._preemption_hook(tuple(self._running)))
        longer = self._schedule_decodes(draft)
        draft.limit_prompts(self._prompt_share(len(longer)))
        for sequence in longer:
            self._admit(draft, rejected, outranked=sequence)
            self._schedule_longer(draft, sequence)
        self._admit(draft, rejected)
        return draft.settle(), rejected

    def _prompt_share(self, num_running_prompts: int) -> int:
        prompts = num_running_prompts + len(self.residency.waiting)
        if self._prompt_limit is None:
            return self._max_num_batched_tokens
        return self._prompt_limit.tokens * max(1, prompts // PROMPTS_PER_SHARE)

    def confirm_moves(self) -> None:
        """Record that the last plan's blocks were moved: what came in is reusable."""
        for sequence in self._draft.swapped_in:
            self._register(sequence, 0)
        self._draft.swapped_in.clear()
        self._draft.swapped_out.clear()
        self._draft.copied.clear()

    def abandon_moves(self) -> None:
        """Give up the KV that the last plan was to move: nobody knows what became of it."""
        draft = self._draft
        for moved in (*draft.swapped_out, *draft.swapped_in, *draft.copied):
            if moved.status in (SequenceStatus.RUNNING, SequenceStatus.SWAPPED):
                self.preemption.drop(moved)

    def advance(self, item: ScheduledSequence) -> None:
        """Record that a scheduled sequence's tokens are computed."""
        sequence, computed = item.sequence, item.sequence.num_computed_tokens
        sequence.num_computed_tokens = computed + item.num_tokens
        first_full = computed // self._pool.block_size
        if sequence.num_computed_tokens // self._pool.block_size > first_full:
            self._register(sequence, first_full)

    def restart(self) -> None:
        """Give up all KV on the device and in the host's pool: nobody knows what is in it."""
        residency = self.residency
        for sequence in [*residency.running, *residency.swapped]:
            if sequence.status in (SequenceStatus.RUNNING, SequenceStatus.SWAPPED):
                self.preemption.drop(sequence)
        self._pool.forget()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return whether no sequence holds blocks any more."""
        self._pool.forget()
        return self._pool.num_used == 0

    def _register(self, sequence: Sequence, first_full: int) -> None:
        num_full = sequence.num_computed_tokens // self._pool.block_size
        chain, table = sequence.prefix_chain, sequence.block_table
        chain.extend(sequence.token_ids, num_full)
        for i in range(first_full, num_full):
            self._pool.register(table[i], chain.links[i])

    def _schedule_decodes(self, draft: Draft) -> list[Sequence]:
        """Schedule those with one token to compute; return the others, one for each search."""
        longer: list[Sequence] = []
        searches: set[SequenceGroup] = set()
        # a copy: preemption changes the queue
        for sequence in list(self._running):
            group = sequence.group
            if group.search is not None and len(group.sequences) > 1:
                if group not in searches and sequence.status is SequenceStatus.RUNNING:
                    searches.add(group)
                    if not self._step_beams(draft, group):
                        longer.append(sequence)
            elif len(sequence.token_ids) - sequence.num_computed_tokens > 1:
                longer.append(sequence)
            elif sequence.status is SequenceStatus.RUNNING and not sequence.is_ending:
                self._schedule_one(draft, sequence, 1)
        return longer

    def _schedule_longer(self, draft: Draft, sequence: Sequence) -> None:
        if sequence.status is not SequenceStatus.RUNNING:
            return
        if sequence.group.steps_together:
            self._catch_up(draft, sequence.group)
            return
        gap = sequence.num_uncomputed_tokens
        num_tokens = min(gap, draft.budget, self._max_chunk)
        if num_tokens:
            self._schedule_one(draft, sequence, num_tokens)
        if num_tokens < gap or sequence.spare_slots:
            wanted = sequence.num_tokens // self._pool.block_size + sequence.num_slots
            covered = self._pool.blocks_for(sequence.num_computed_tokens + num_tokens)
            draft.owe(sequence, wanted - max(covered, len(sequence.block_table)))

    def _schedule_one(self, draft: Draft, sequence: Sequence, num_tokens: int) -> None:
        table, computed = sequence.block_table, sequence.num_computed_tokens
        size = self._pool.block_size
        if computed + num_tokens > len(table) * size or (
            sequence.group.has_forked and self._pool.references(table[computed // size]) > 1
        ):
            self._reserve(draft, [(sequence, num_tokens)])
        else:
            draft.add_in_place(sequence, num_tokens)

    def _reserve(self, draft: Draft, wanted: list[tuple[Sequence, int]]) -> bool:
        """Plan sequences of one group, all or none; False if they must sit the step out."""
        parts = draft.measure(wanted)
        while sum(part.num_blocks for part in parts) > draft.num_free:
            if not self._make_room(draft, wanted[0][0]):
                return False
            parts = draft.measure(wanted)
        for part in parts:
            draft.add(part)
        return True

    def _make_room(self, draft: Draft, sequence: Sequence) -> bool:
        """Let the last in order give way to `sequence`; False if that is itself, or its search."""
        draft.lacks_blocks = True
        victim, group = self._running.last, sequence.group
        if victim is not sequence and not (victim.group is group and group.steps_together):
            self.preemption.give_way(draft, victim, group)
            return True
        if group.steps_together and len(self._running) == len(group.sequences):
            # Alone and still without room: beams hold equal blocks twice, computed beside another
            # request or after the cache was reset. Computed again, alone, they share them.
            self.preemption.give_way(draft, sequence, group)
        return False

    def _step_beams(self, draft: Draft, group: SequenceGroup) -> bool:
        """Schedule each beam's last token; False unless that is all that is left to compute."""
        if any(len(s.token_ids) - s.num_computed_tokens > 1 for s in group.sequences):
            return False
        if draft.budget >= len(group.sequences):
            self._reserve(draft, [(s, 1) for s in group.sequences])
        return True

    def _catch_up(self, draft: Draft, group: SequenceGroup) -> None:
        """Bring beams to their last token but one, waiting for those that compute shared blocks."""
        size = self._pool.block_size
        target = group.sequences[0].num_tokens - 1
        upcoming: set[bytes] = set()
        for sequence in group.sequences:
            cached = self._cached_blocks(draft, sequence)
            if cached is None:
                return
            first = len(cached) or sequence.num_computed_tokens // size
            digests = [link.digest for link in sequence.prefix_chain.links[first : target // size]]
            if digests and digests[0] in upcoming:
                continue
            upcoming.update(digests)
            if cached:
                self.residency.hit(sequence, cached)
            num_tokens = min(target - sequence.num_computed_tokens, draft.budget, self._max_chunk)
            if num_tokens and not self._reserve(draft, [(sequence, num_tokens)]):
                return
        held = distinct_blocks(s.block_table for s in group.sequences)
        promised = sum(draft.num_promised(s) for s in group.sequences)
        draft.owe(group.sequences[0], group.num_blocks_wanted - held - promised)
        self._step_beams(draft, group)

    def _cached_blocks(self, draft: Draft, sequence: Sequence) -> list[int] | None:
        """Find the beginning of a beam without blocks; None if there is no room to hold it."""
        if sequence.block_table:
            return []
        while True:
            match = self._pool.match_prefix(sequence.prefix_chain, sequence.token_ids)
            if match.num_free <= draft.num_free:
                return match.block_ids
            if not self._make_room(draft, sequence):
                return None

    def _admit(
        self, draft: Draft, rejected: list[Rejection], outranked: Sequence | None = None
    ) -> None:
        """Start candidates while they fit; only those of better priority than `outranked`."""
        position = 0
        while draft.budget:
            candidate = self._admission.next_candidate(draft, position)
            if candidate is None or (outranked and candidate.priority >= outranked.priority):
                return
            if candidate.is_ending or candidate.group.waits_for_sibling(
                candidate, self._pool.block_size
            ):
                position += 1
                continue
            demand = self._admission.demand(candidate)
            verdict = self._admission.judge(draft, candidate, demand)
            if verdict is Verdict.OK:
                self._start(draft, candidate, demand)
            elif verdict is Verdict.NEVER:
                for sequence in candidate.group.sequences:
                    draft.withdraw(sequence)
                    self.residency.finish(sequence)
                candidate.group.sequences = []
                rejected.append(self._admission.rejection(candidate))
            elif not self._admission.make_room(draft, candidate, demand):
                return

    def _start(self, draft: Draft, candidate: Sequence, demand: Demand) -> None:
        group = candidate.group
        if candidate.status is SequenceStatus.SWAPPED:
            draft.swap_in += self.residency.swap_in(demand.sequences)
            draft.swapped_in += demand.sequences
        elif group.steps_together:
            for sequence in demand.sequences:
                self.residency.start(sequence, [])
        else:
            self._count_hits(candidate, demand)
            self.residency.start(candidate, demand.match.block_ids)
        self.events.note(EventKind.RUNNING, demand.sequences)
        if not group.steps_together:
            for sequence in demand.sequences:
                self._schedule_longer(draft, sequence)
        elif not self._step_beams(draft, group):
            self._catch_up(draft, group)

    def _count_hits(self, candidate: Sequence, demand: Demand) -> None:
        group = candidate.group
        if not group.has_started:
            group.has_started = True
            num_hit = len(demand.match.block_ids) * self._pool.block_size
            self.prefix_query_tokens += candidate.num_tokens
            self.prefix_hit_tokens += num_hit
            group.num_cached_tokens = min(num_hit, candidate.num_prompt_tokens)
