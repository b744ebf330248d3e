"""From the results of a step to outputs: tokens are appended, children forked, ends found."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from inferq.worker.engine.blocks.residency import Residency
from inferq.worker.engine.requests.beam import BeamHypothesis, BeamSearch
from inferq.worker.engine.requests.ends import end_of
from inferq.worker.engine.requests.group import SequenceGroup
from inferq.worker.engine.requests.sequence import Sequence
from inferq.worker.engine.requests.token_output import TokenOutput
from inferq.worker.engine.scheduling.plan import (
    UNKNOWN_TOKEN,
    BeamCandidates,
    SampledToken,
    SequenceResult,
    StepPlan,
)


class Collector:
    """Applies what the runner sampled to the sequences, and ends those that are complete."""

    def __init__(
        self, residency: Residency, *, eos_token_ids: frozenset[int], max_length: int
    ) -> None:
        self._residency = residency
        self._eos_token_ids = eos_token_ids
        self._max_length = max_length

    def collect(self, plan: StepPlan, results: SequenceOf[SequenceResult]) -> list[TokenOutput]:
        """Return the outputs of a step whose tokens are computed; who has ended brings none."""
        outputs: list[TokenOutput] = []
        candidates: dict[Sequence, BeamCandidates] = {}
        for item, result in zip(plan.scheduled, results, strict=True):
            sequence = item.sequence
            if sequence.is_finished:
                continue
            if result.candidates is not None:
                candidates[sequence] = result.candidates
            elif item.children:
                self._fork_children(sequence, result.samples, outputs)
            elif result.samples:
                outputs.append(self._append(sequence, result.samples[0]))
        for group in dict.fromkeys(sequence.group for sequence in candidates):
            outputs += self._advance_beams(group, [candidates[s] for s in group.sequences])
        return outputs

    def _append(self, sequence: Sequence, token: SampledToken) -> TokenOutput:
        group, token_ids = sequence.group, sequence.token_ids
        if token_ids[-1] == UNKNOWN_TOKEN:
            token_ids[-1] = token.token_id
        else:
            token_ids.append(token.token_id)
        cumulative = None
        if token.chosen_logprob is not None and sequence.cumulative_logprob is not None:
            cumulative = sequence.cumulative_logprob = (
                sequence.cumulative_logprob + token.chosen_logprob
            )
        end = end_of(sequence, self._eos_token_ids, self._max_length)
        if end is not None:
            self._residency.finish(sequence)
            group.sequences.remove(sequence)
        prompt_logprobs = None
        if group.prompt_logprobs is not None and sequence.child_index == 0:
            prompt_logprobs = group.take_prompt_logprobs()
        return TokenOutput(
            sequence.request_id,
            (token.token_id,),
            None if token.logprob is None else (token.logprob,),
            None if end is None else end.finish_reason,
            None if end is None else end.stop_reason,
            group.num_cached_tokens,
            index=sequence.child_index,
            cumulative_logprob=cumulative,
            prompt_logprobs=prompt_logprobs,
            request_finished=end is not None and not group.sequences,
        )

    def _fork_children(
        self, sequence: Sequence, samples: tuple[SampledToken, ...], outputs: list[TokenOutput]
    ) -> None:
        group, residency = sequence.group, self._residency
        residency.keep_slots(sequence, 0)
        children = [sequence]
        children += [residency.fork(sequence, index) for index in sequence.pending_children[1:]]
        sequence.pending_children = ()
        group.sequences += children[1:]
        group.has_forked = True
        for child, token in zip(children, samples, strict=True):
            outputs.append(self._append(child, token))

    def _advance_beams(
        self, group: SequenceGroup, candidates: list[BeamCandidates]
    ) -> list[TokenOutput]:
        search = group.search
        assert search is not None, "only searches have candidates"
        survivors = search.advance(candidates).survivors
        parents, beams = group.sequences, []
        in_place: set[int] = set()
        for survivor in survivors:
            parent = parents[survivor.parent]
            if survivor.parent in in_place:
                parent = self._residency.fork(parent, next(group.beam_indexes))
                group.has_forked = True
            in_place.add(survivor.parent)
            beams.append(parent)
        for index, parent in enumerate(parents):
            if index not in in_place:
                self._residency.finish(parent)
        for beam, survivor in zip(beams, survivors, strict=True):
            beam.token_ids.append(survivor.token_id)
            beam.cumulative_logprob = survivor.cumulative_logprob
            self._residency.keep_slots(beam, 0)
        group.sequences = beams
        if beams:
            self._residency.keep_slots(beams[0], group.params.num_candidates - len(beams))
            if self._outgrow(group):
                search.stop()
                self.drop(group)
        return _hypotheses(group, search) if search.is_done else []

    def _outgrow(self, group: SequenceGroup) -> bool:
        """Whether the beams' next step needs more blocks than there are, even if they run alone.

        It depends on their texts only, so that a search ends there whatever runs beside it.
        """
        pool = self._residency.pool
        if len(group.sequences) * pool.blocks_for(group.sequences[0].num_tokens) <= pool.num_blocks:
            return False
        group.note_blocks_wanted(pool.block_size)
        return group.num_blocks_wanted > pool.num_blocks

    def drop(self, group: SequenceGroup) -> None:
        """End all sequences of a group without output."""
        for sequence in group.sequences:
            self._residency.finish(sequence)
        group.sequences = []

    def drop_output(self, group: SequenceGroup, index: int) -> bool:
        """End one output without report, forked already or not; False if it does not live."""
        if group.search is not None:
            return False
        for sequence in group.sequences:
            pending = tuple(child for child in sequence.pending_children if child != index)
            if pending and pending != sequence.pending_children:
                self._residency.keep_slots(sequence, len(pending) - 1)
                if sequence.child_index == index:
                    self._residency.reindex(sequence, pending[0])
                sequence.pending_children = pending if len(pending) > 1 else ()
                return True
            if sequence.child_index == index:
                self._residency.finish(sequence)
                group.sequences.remove(sequence)
                return True
        return False


def _hypotheses(group: SequenceGroup, search: BeamSearch) -> list[TokenOutput]:
    found = search.hypotheses()
    return [
        _hypothesis(group, index, hypothesis, is_last=index + 1 == len(found))
        for index, hypothesis in enumerate(found)
    ]


def _hypothesis(
    group: SequenceGroup, index: int, hypothesis: BeamHypothesis, *, is_last: bool
) -> TokenOutput:
    return TokenOutput(
        group.request_id,
        hypothesis.token_ids,
        None,
        hypothesis.finish_reason,
        hypothesis.stop_reason,
        group.num_cached_tokens,
        index=index,
        cumulative_logprob=hypothesis.cumulative_logprob,
        score=hypothesis.score,
        prompt_logprobs=group.take_prompt_logprobs() if index == 0 else None,
        request_finished=is_last,
    )
