"""When a sequence has ended, as far as token ids tell."""

from __future__ import annotations

from typing import NamedTuple

from inferq.protocol.messages import FinishReason
from inferq.worker.engine.requests.sequence import Sequence


class End(NamedTuple):
    """How a sequence ended; `stop_reason` is the token of `stop_token_ids` that did it."""

    finish_reason: FinishReason
    stop_reason: int | None = None


def end_of(sequence: Sequence, eos_token_ids: frozenset[int], max_length: int) -> End | None:
    """Return how `sequence` ended with its last token, or None if it goes on.

    A function of the tokens alone, so that a resumed sequence ends where the first run would have.
    """
    params = sequence.params
    num_output = sequence.num_output_tokens
    if num_output == 0:
        return None
    if num_output >= params.min_tokens:
        last = sequence.token_ids[-1]
        if last in eos_token_ids and not params.ignore_eos:
            return End(FinishReason.STOP)
        if last in params.stop_token_ids:
            return End(FinishReason.STOP, last)
    return End(FinishReason.LENGTH) if is_full(sequence, max_length) else None


def is_full(sequence: Sequence, max_length: int) -> bool:
    """Whether no more tokens may follow, whatever the last one is."""
    most = sequence.params.max_tokens
    if most is not None and sequence.num_output_tokens >= most:
        return True
    return len(sequence.token_ids) >= max_length
