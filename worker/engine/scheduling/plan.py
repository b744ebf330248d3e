"""What the scheduler asks of the model runner for one step, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from inferq.protocol.errors import ErrorInfo
from inferq.protocol.messages import TokenLogprob
from inferq.worker.engine.requests.sequence import Sequence

#: The last entry of `token_ids` while the step that samples it has been launched, not collected.
UNKNOWN_TOKEN: Final = -1


@dataclass(slots=True)
class ScheduledSequence:
    """Compute `token_ids[first : first + num_tokens]` of `sequence`, from `num_computed_tokens` on.

    Its block table already covers these tokens. If it `samples`, one token is sampled for each
    child index of `children` from the last row's logits; empty stands for the sequence's own. The
    last of the tokens may be `UNKNOWN_TOKEN`: it is what the step before sampled.
    """

    sequence: Sequence
    num_tokens: int
    children: tuple[int, ...] = ()
    #: Likeliest next tokens to return, in a beam search; they decide a step, more change nothing.
    num_candidates: int = 0
    first: int = field(init=False)
    #: Whether the sequence's last token is computed, so that the next one can be sampled.
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        self.first = first = self.sequence.num_computed_tokens
        self.samples = first + self.num_tokens == len(self.sequence.token_ids)


class BlockCopy(NamedTuple):
    """Copy the KV of all layers from one block to another."""

    source: int
    target: int


@dataclass(slots=True)
class StepPlan:
    """One step's work: sequences with one token to compute (`num_decodes` of them) come first.

    Before anything is computed, `swap_out` moves blocks from the device to the host's pool,
    `swap_in` from the host's pool to the device (never both in one step), and `block_copies` on
    the device, in this order.
    """

    scheduled: list[ScheduledSequence]
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)
    num_decodes: int = field(init=False)
    #: Tokens to compute in all.
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        counts = [item.num_tokens for item in self.scheduled]
        self.num_decodes = counts.count(1)
        self.num_tokens = sum(counts)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one sequence.

    `logprob` is what the request asked to see; `chosen_logprob` the raw log-probability of the
    token, where the request asked for logprobs or its outputs are ranked.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    chosen_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class BeamCandidates:
    """The likeliest next tokens of one beam, as many as the plan asks for, best first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a step brought to one scheduled sequence.

    `samples` has a token for each of its `children` if it samples, `candidates` takes their place
    in beam search. `prompt_logprobs` are those of the prompt's tokens after each prompt position
    computed in this step, if the request asked for them. With an `error` the request cannot go on.
    """

    samples: tuple[SampledToken, ...] = ()
    candidates: BeamCandidates | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class RunnerSpeeds:
    """What it costs to compute or to move KV, measured: decides how to preempt."""

    prefill_tokens_per_s: float
    #: One way between the device and the host's pool.
    swap_bytes_per_s: float
    block_bytes: int


class StepHandle(Protocol):
    """A step that was launched."""

    def results(self) -> SequenceOf[SequenceResult]:
        """Wait for the step; return one result for each scheduled sequence, in the plan's order.

        Raises what `ModelRunner.execute` raises.
        """


class ModelRunner(Protocol):
    """Whoever computes a plan: it moves blocks, writes the planned tokens' KV, then samples."""

    def execute(self, plan: StepPlan) -> SequenceOf[SequenceResult]:
        """Return one result for each scheduled sequence, in the plan's order."""

    def launch(self, plan: StepPlan) -> StepHandle:
        """Begin a step, to be computed after those launched before; their results may be open.

        The plan's sequences are read before this returns, and not later unless the engine collects
        the step before it changes them (see `Engine`). Only an engine that launches ahead calls it.
        """
