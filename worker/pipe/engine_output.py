"""What the engine brings to one output of a request: made of its steps, sent over the pipe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, TypeVar

from inferq.protocol.errors import ErrorInfo
from inferq.protocol.messages import FinishReason, TokenLogprob
from inferq.worker.engine.requests.token_output import TokenOutput

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What some consecutive steps brought to one output of a request.

    `cumulative_logprobs` has the sum up to each token, where the engine knows it; for a beam it is
    the whole beam's at every token. `request_finished` goes with the last one of the request.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprobs: tuple[float, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    error: ErrorInfo | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    request_finished: bool = False

    @classmethod
    def of_step(cls, step: TokenOutput) -> Self:
        """Take over what one step brought."""
        total = step.cumulative_logprob
        return cls(
            request_id=step.request_id,
            index=step.index,
            token_ids=step.token_ids,
            logprobs=step.logprobs,
            cumulative_logprobs=None if total is None else (total,) * len(step.token_ids),
            finish_reason=step.finish_reason,
            stop_reason=step.stop_reason,
            num_cached_tokens=step.num_cached_tokens,
            error=step.error,
            prompt_logprobs=step.prompt_logprobs,
            request_finished=step.request_finished,
        )

    def followed_by(self, later: EngineOutput) -> EngineOutput:
        """Return this and what came after it as one; this one has not finished."""
        prompt = self.prompt_logprobs
        return replace(
            later,
            token_ids=(*self.token_ids, *later.token_ids),
            logprobs=_joined(self.logprobs, later.logprobs),
            cumulative_logprobs=_joined(self.cumulative_logprobs, later.cumulative_logprobs),
            prompt_logprobs=later.prompt_logprobs if prompt is None else prompt,
        )


def _joined(first: tuple[T, ...] | None, second: tuple[T, ...] | None) -> tuple[T, ...] | None:
    if first is None or second is None:
        return second if first is None else first
    return (*first, *second)
