"""What the sequences of a step ask beyond a plain sample; a step in which none does is quick."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from inferq.protocol.params import SamplingParams
from inferq.worker.engine.requests.sequence import Sequence
from inferq.worker.engine.sampling.edit_asks import asks_edits
from inferq.worker.engine.scheduling.plan import ScheduledSequence, StepPlan


class Asked(IntFlag):
    """What a sequence asks, as its host row keeps it."""

    EDITS = 1
    BEAMS = 2
    PROMPT_LOGPROBS = 4
    #: Several outputs, whose first tokens may come from one row of logits.
    OUTPUTS = 8

    @classmethod
    def by(cls, params: SamplingParams) -> Asked:
        """Return what the parameters ask."""
        asked = cls(0)
        if asks_edits(params):
            asked |= cls.EDITS
        if params.beam_width is not None:
            asked |= cls.BEAMS
        elif params.num_candidates > 1:
            asked |= cls.OUTPUTS
        if params.prompt_logprobs is not None:
            asked |= cls.PROMPT_LOGPROBS
        return asked


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Prompt positions [N] whose next token's log-probability is asked, over several sequences."""

    rows: NDArray[np.int64]
    """Indexes into the step's tokens T."""
    next_tokens: NDArray[np.int64]
    counts: NDArray[np.int64]
    """Most likely tokens to report at each position."""
    owners: list[tuple[int, int]]
    """Indexes into the plan, and how many of the positions are each's, in order."""


@dataclass(frozen=True, slots=True)
class StepAsks:
    """A step's asks, where there are any; rows are those of the logits [R] that are sampled."""

    editing: list[tuple[int, Sequence]]
    """Rows whose logits are edited."""
    prefilling: list[Sequence]
    """Sequences that will ask for edits, but do not sample yet."""
    beams: list[tuple[int, int]]
    """Rows of beams, and how many candidates each wants."""
    children: list[tuple[int, ...]] | None
    """The outputs to sample from each row, where one has several."""
    prompt: PromptRows | None


def step_asks(
    plan: StepPlan,
    asked: NDArray[np.uint8],
    sampled: NDArray[np.int64],
    starts: NDArray[np.int64],
    vocab_size: int,
) -> StepAsks | None:
    """Collect the asks of a plan, given each scheduled sequence's and its first token's row in T.

    `sampled` are the indexes of the sequences that sample. None where nobody asks anything.
    """
    if not asked.any():
        return None
    scheduled = plan.scheduled
    rows = {index: row for row, index in enumerate(sampled.tolist())}
    edited = np.flatnonzero(asked & Asked.EDITS).tolist()
    beams = np.flatnonzero(asked & Asked.BEAMS).tolist()
    children = None
    if any(scheduled[i].children for i in np.flatnonzero(asked & Asked.OUTPUTS).tolist()):
        children = [
            scheduled[i].children or (scheduled[i].sequence.child_index,) for i in sampled.tolist()
        ]
    with_prompt = np.flatnonzero(asked & Asked.PROMPT_LOGPROBS).tolist()
    return StepAsks(
        editing=[(rows[i], scheduled[i].sequence) for i in edited if i in rows],
        prefilling=[scheduled[i].sequence for i in edited if i not in rows],
        beams=[(rows[i], scheduled[i].num_candidates) for i in beams if i in rows],
        children=children,
        prompt=_prompt_rows([(i, scheduled[i], int(starts[i])) for i in with_prompt], vocab_size),
    )


def _prompt_rows(
    items: list[tuple[int, ScheduledSequence, int]], vocab_size: int
) -> PromptRows | None:
    """Take the positions whose next token is the prompt's, of sequences without output.

    One with output is computed again: its prompt was reported before.
    """
    rows, tokens, counts, owners = [], [], [], []
    for index, item, start in items:
        sequence, first = item.sequence, item.sequence.num_computed_tokens
        size = min(item.num_tokens, sequence.num_prompt_tokens - 1 - first)
        if size <= 0 or len(sequence.token_ids) > sequence.num_prompt_tokens:
            continue
        asked = sequence.params.prompt_logprobs
        rows.append(np.arange(start, start + size))
        tokens.append(np.array(sequence.token_ids[first + 1 : first + 1 + size], dtype=np.int64))
        counts.append(np.full(size, num_alternatives(asked, vocab_size), dtype=np.int64))
        owners.append((index, size))
    if not owners:
        return None
    return PromptRows(np.concatenate(rows), np.concatenate(tokens), np.concatenate(counts), owners)


def num_alternatives(asked: int | None, vocab_size: int) -> int:
    """Return how many tokens to report for `logprobs` or `prompt_logprobs`; -1 for none at all."""
    if asked is None:
        return -1
    return vocab_size if asked == -1 else min(asked, vocab_size)
