"""What an engine says about one output of a request."""

from __future__ import annotations

from dataclasses import dataclass

from inferq.protocol.errors import ErrorInfo
from inferq.protocol.messages import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What one step added to one output of a request.

    The last one of an output has a finish reason, and only that one; the last one of the request
    has `request_finished`. `stop_reason` is the token of `stop_token_ids` that ended the output,
    `error` goes with reason `error`. `cumulative_logprob` sums the raw log-probabilities of the
    output so far, where they are known: not for outputs that were resumed. In beam search `score`
    is what ranks it, that sum over its length to the power of `length_penalty`. `prompt_logprobs`
    come once, with output 0's first token: an entry for each prompt token, None for the first.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: ErrorInfo | None = None
    index: int = 0
    cumulative_logprob: float | None = None
    score: float | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    request_finished: bool = False
