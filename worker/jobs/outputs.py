"""What offline generation returns, in the shape that vLLM's users know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inferq.protocol.errors import ErrorInfo
from inferq.protocol.messages import TokenLogprob
from inferq.worker.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position.

    `rank` is 1 for the most likely; None for a chosen token outside the most likely ones returned.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One generated continuation.

    `logprobs` has one map per token, from token id to `Logprob`, if the request asked for them;
    `cumulative_logprob` is their sum, known too where outputs were chosen by it. For a beam it is
    the whole beam's, also where a stop string cut its end.
    `finish_reason` is `stop`, `length` or `error`; `stop_reason` the stop string or token id met.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its continuations; `error` is set when it could not be served.

    `prompt_logprobs` has one map per prompt token, None for the first, if they were asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    error: ErrorInfo | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def describe_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> list[dict[int, Logprob]]:
    """Return vLLM's form of logprobs: per position, the most likely tokens and the chosen one."""
    return [
        _describe(tokenizer, token_id, entry)
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def describe_prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> list[dict[int, Logprob] | None]:
    """Return vLLM's form of a prompt's logprobs: nothing is known of the first token."""
    return [
        None if entry is None else _describe(tokenizer, token_id, entry)
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def _describe(tokenizer: Tokenizer, token_id: int, entry: TokenLogprob) -> dict[int, Logprob]:
    position = {
        other: Logprob(logprob, rank, tokenizer.decode_token(other))
        for rank, (other, logprob) in enumerate(entry.top, start=1)
    }
    if token_id not in position:
        position[token_id] = Logprob(entry.logprob, None, tokenizer.decode_token(token_id))
    return position
