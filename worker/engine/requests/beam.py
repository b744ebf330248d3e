"""Beam search over token ids, with the rules of transformers' `generate`; pure arithmetic."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Final, NamedTuple

from inferq.protocol.messages import FinishReason
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.requests.ends import End
from inferq.worker.engine.scheduling.plan import BeamCandidates

#: Keeps `length ** length_penalty` and scores divided by it within floats: about e^-460 to e^460.
_MAX_EXPONENT: Final = 460.0


class Survivor(NamedTuple):
    """A beam that goes on: live beam number `parent` of the step before, and one more token."""

    parent: int
    token_id: int
    #: Sum of the log-probabilities of the tokens generated so far.
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What became of the live beams: the new ones, best first; none when the search is done."""

    survivors: tuple[Survivor, ...]


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """A finished text; `score` is `cumulative_logprob / len(token_ids) ** length_penalty`."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | None = None


class _Beam(NamedTuple):
    """A text as its last token and the text before it, which beams share; the prompt is empty."""

    parent: _Beam | None
    token_id: int
    cumulative_logprob: float

    def token_ids(self) -> tuple[int, ...]:
        token_ids = []
        beam = self
        while beam.parent is not None:
            token_ids.append(beam.token_id)
            beam = beam.parent
        return tuple(reversed(token_ids))


class _Finished(NamedTuple):
    score: float
    beam: _Beam
    end: End


class BeamSearch:
    """The search for the best continuations of one prompt, one token a step.

    Each step ranks every continuation of every live beam by the sum of its log-probabilities;
    equals go by beam, then by token id, lowest first. Of the first `beam_width` in this ranking,
    those that end with an end token finish; an end token further down is dropped. The best
    `beam_width` that do not end live on. The best `beam_width` finished texts are kept, by score;
    of equals the one that finished first.

    The search is done when `beam_width` texts have finished and `early_stopping` is true, or no
    live beam could beat the worst of them: judged by the score that the best beam would have if it
    finished now or, with "never" and a positive length penalty, at `max_new_tokens`. It is also
    done at `max_new_tokens` (at least 1), where the first `beam_width` in the ranking finish.

    End tokens are `eos_token_ids`, unless `params.ignore_eos`, and `params.stop_token_ids`; they
    do not occur among the first `min_tokens`. Probabilities that are zero are no continuations, so
    that fewer than `beam_width` beams may live, and fewer texts finish.
    """

    def __init__(
        self, params: SamplingParams, *, eos_token_ids: frozenset[int], max_new_tokens: int
    ) -> None:
        if params.beam_width is None:
            raise ValueError("the parameters ask for no beams")
        self._width = params.beam_width
        self._num_outputs = params.n
        self._length_penalty = params.length_penalty
        self._may_improve = params.early_stopping in (False, "never")
        self._looks_ahead = params.early_stopping == "never" and params.length_penalty > 0
        self._min_tokens = params.min_tokens
        self._max_new_tokens = max_new_tokens
        ends = {token_id: End(FinishReason.STOP, token_id) for token_id in params.stop_token_ids}
        if not params.ignore_eos:
            ends |= dict.fromkeys(eos_token_ids, End(FinishReason.STOP))
        self._ends = ends
        self._live: tuple[_Beam, ...] = (_Beam(None, -1, 0.0),)
        self._finished: list[_Finished] = []
        self._length = 0

    @property
    def num_candidates(self) -> int:
        """How many of each beam's likeliest tokens decide a step; more change nothing."""
        return self._width + len(self._ends)

    @property
    def num_live(self) -> int:
        """Beams to compute for the next step; at first one, the prompt."""
        return len(self._live)

    @property
    def is_done(self) -> bool:
        """Whether the hypotheses are final."""
        return not self._live

    def advance(self, candidates: SequenceOf[BeamCandidates]) -> BeamStep:
        """Take the likeliest next tokens of each live beam, in the order of the last survivors."""
        if len(candidates) != len(self._live) or self.is_done:
            raise ValueError(f"{len(candidates)} candidates for {len(self._live)} live beams")
        self._length += 1
        survivors = self._select(candidates)
        if not survivors and not self._finished:
            raise ValueError("no candidate has a probability above zero")
        if self._is_final(survivors):
            survivors = []
        self._live = tuple(
            _Beam(self._live[parent], token_id, cumulative)
            for parent, token_id, cumulative in survivors
        )
        return BeamStep(tuple(survivors))

    def stop(self) -> None:
        """Finish the live beams as they are, as if `max_new_tokens` had been reached."""
        end = End(FinishReason.LENGTH)
        kept = list(self._finished)
        for beam in self._live:
            score = self._score(beam.cumulative_logprob, self._length)
            kept.append(_Finished(score, beam, end))
        kept.sort(key=lambda text: text.score, reverse=True)
        self._finished = kept[: self._width]
        self._live = ()

    def hypotheses(self) -> tuple[BeamHypothesis, ...]:
        """Return the best finished texts, best first, at most `n`; final when the search is."""
        return tuple(
            BeamHypothesis(beam.token_ids(), beam.cumulative_logprob, score, *end)
            for score, beam, end in self._finished[: self._num_outputs]
        )

    def _select(self, candidates: SequenceOf[BeamCandidates]) -> list[Survivor]:
        """Keep those that finish in this step, and return those that live on."""
        survivors: list[Survivor] = []
        finished: list[_Finished] = []
        for rank, continuation in enumerate(self._ranking(candidates)):
            end = self._end_of(continuation.token_id)
            if end is None:
                survivors.append(continuation)
            elif rank < self._width:
                finished.append(self._finish(continuation, end))
            at_limit = self._length >= self._max_new_tokens and rank + 1 >= self._width
            if at_limit or len(survivors) == self._width:
                break
        if finished:
            kept = [*self._finished, *finished]
            kept.sort(key=lambda text: text.score, reverse=True)  # stable: the earlier stays first
            self._finished = kept[: self._width]
        return survivors

    def _ranking(self, candidates: SequenceOf[BeamCandidates]) -> Iterator[Survivor]:
        """Yield the possible continuations, best first, ranking no more than are taken."""
        rows = (self._continuations(parent, row) for parent, row in enumerate(candidates))
        for cost, parent, token_id in heapq.merge(*rows):
            yield Survivor(parent, token_id, -cost)

    def _continuations(
        self, parent: int, candidates: BeamCandidates
    ) -> Iterator[tuple[float, int, int]]:
        cumulative = self._live[parent].cumulative_logprob
        may_end = self._length > self._min_tokens
        for token_id, logprob in zip(candidates.token_ids, candidates.logprobs, strict=True):
            if logprob > -math.inf and (may_end or token_id not in self._ends):
                yield -(cumulative + logprob), parent, token_id

    def _end_of(self, token_id: int) -> End | None:
        if end := self._ends.get(token_id):
            return end
        return End(FinishReason.LENGTH) if self._length >= self._max_new_tokens else None

    def _finish(self, last: Survivor, end: End) -> _Finished:
        beam = _Beam(self._live[last.parent], last.token_id, last.cumulative_logprob)
        return _Finished(self._score(beam.cumulative_logprob, self._length), beam, end)

    def _is_final(self, survivors: list[Survivor]) -> bool:
        if not survivors:
            return True
        if len(self._finished) < self._width:
            return False
        if not self._may_improve:
            return True
        length = self._max_new_tokens if self._looks_ahead else self._length
        best_possible = self._score(survivors[0].cumulative_logprob, length)
        return best_possible <= self._finished[-1].score

    def _score(self, cumulative_logprob: float, length: int) -> float:
        exponent = self._length_penalty * math.log(length)
        if abs(exponent) > _MAX_EXPONENT:
            return cumulative_logprob / math.exp(math.copysign(_MAX_EXPONENT, exponent))
        return cumulative_logprob / float(length**self._length_penalty)
