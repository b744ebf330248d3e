"""What the scheduler asks of the model runner for one step, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from inferq.protocol.messages import TokenLogprob
from inferq.worker.engine.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """Compute `token_ids[num_computed_tokens : num_computed_tokens + num_tokens]` of `sequence`.

    Its block table already covers these tokens.
    """

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the last known token is computed, so that the next one can be sampled."""
        sequence = self.sequence
        return sequence.num_computed_tokens + self.num_tokens == len(sequence.token_ids)


@dataclass(slots=True)
class StepPlan:
    """One step's work: sequences with one token to compute (`num_decodes` of them) come first."""

    scheduled: list[ScheduledSequence]
    num_decodes: int = field(init=False)
    #: Tokens to compute in all.
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        counts = [item.num_tokens for item in self.scheduled]
        self.num_decodes = counts.count(1)
        self.num_tokens = sum(counts)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one sequence, and its log-probability if the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None = None


class ModelRunner(Protocol):
    """Whoever computes a plan: it writes the planned tokens' KV, then samples."""

    def execute(self, plan: StepPlan) -> SequenceOf[SampledToken]:
        """Return one token for each scheduled sequence that `samples`, in the plan's order."""
