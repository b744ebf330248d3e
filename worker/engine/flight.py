"""Steps that were launched: what their results must be known for, and how their state is kept.

Between launching a step and collecting it, the books say what will be true once it is computed:
its tokens count as computed, and where it samples, `UNKNOWN_TOKEN` stands for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from inferq.worker.engine.requests.ends import is_full
from inferq.worker.engine.scheduling.plan import UNKNOWN_TOKEN, SequenceResult, StepHandle, StepPlan
from inferq.worker.engine.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan whose results are still to be collected; launched at `began`, in seconds."""

    plan: StepPlan
    handle: StepHandle
    began: float


@dataclass(frozen=True, slots=True)
class Landed:
    """The handle of a step that was computed at once."""

    sequence_results: SequenceOf[SequenceResult]

    def results(self) -> SequenceOf[SequenceResult]:
        """Return what was computed."""
        return self.sequence_results


def decides_on_host(plan: StepPlan) -> bool:
    """Whether the host must know the step's results before it can plan the next one.

    So it is with forks, the beams of a search, edits that follow the output, and log-probabilities
    of prompts, of which the next step must know how many there are.
    """
    for item in plan.scheduled:
        group = item.sequence.group
        if group.prompt_logprobs is not None or item.children:
            return True
        if group.decides_on_host and item.samples:
            return True
    return False


def assume_computed(plan: StepPlan, scheduler: Scheduler, max_length: int) -> None:
    """Let the books say that the plan was computed, with its samples unknown."""
    scheduler.confirm_moves()
    for item in plan.scheduled:
        sequence = item.sequence
        if sequence.is_finished:
            continue
        scheduler.advance(item)
        if item.samples:
            sequence.token_ids.append(UNKNOWN_TOKEN)
            sequence.is_ending = is_full(sequence, max_length)


def forget_samples(plan: StepPlan) -> None:
    """Take back the unknown tokens of a plan that was assumed to be computed, and was not."""
    for item in plan.scheduled:
        sequence = item.sequence
        if sequence.token_ids[-1] == UNKNOWN_TOKEN:
            sequence.token_ids.pop()
            sequence.is_ending = False
