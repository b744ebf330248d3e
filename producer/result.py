"""The whole answer of a job, put together from its events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inferq.producer.stream import StreamEvent, TokenStream
from inferq.protocol.messages import FinishReason, Terminal, Timings, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class JobOutput:
    """One output of a job; `stop_reason` is the stop string or token id that ended it.

    `cumulative_logprob` sums its tokens' log-probabilities, with `logprobs`, `best_of` or beams;
    of a beam it is the whole beam's, also where a stop string cut its end.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """A finished job. `attempts` counts the workers that took it.

    `outputs` are in the order of their indexes, best first with `best_of` and beams.
    `prompt_logprobs` have an entry for each prompt token, None for the first; `prompt_token_ids`
    come with them, or when asked for. `token_texts` has the bytes of every token that is named
    here, where log-probabilities were asked for.
    """

    job_id: str
    outputs: tuple[JobOutput, ...]
    usage: Usage
    timings: Timings
    attempts: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    token_texts: Mapping[int, bytes] = field(default_factory=dict)
    prompt_token_ids: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """The text of the first output."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first output."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The log-probabilities of the first output, if they were asked for."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """How the first output ended."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token id that ended the first output."""
        return self.outputs[0].stop_reason


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the model gets it: its token ids, all of its text, and the bytes of each token.

    The bytes of one token need not be whole characters.
    """

    token_ids: tuple[int, ...]
    text: str
    token_texts: tuple[bytes, ...]


@dataclass(slots=True)
class _Draft:
    """One output while its events come in."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None

    def add(self, event: StreamEvent) -> None:
        self.pieces.append(event.text)
        self.token_ids.extend(event.token_ids)
        if event.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(event.logprobs)
        self.finish_reason = event.finish_reason or self.finish_reason
        self.stop_reason = event.stop_reason if event.stop_reason is not None else self.stop_reason
        if event.cumulative_logprob is not None:
            self.cumulative_logprob = event.cumulative_logprob

    def output(self, index: int) -> JobOutput:
        return JobOutput(
            index=index,
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids),
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=self.cumulative_logprob,
        )


async def collect(stream: TokenStream) -> JobResult:
    """Read a stream that begins at 0 to its end."""
    drafts: dict[int, _Draft] = {}
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    token_texts: dict[int, bytes] = {}
    async with stream:
        async for event in stream:
            drafts.setdefault(event.index, _Draft()).add(event)
            prompt_logprobs = event.prompt_logprobs or prompt_logprobs
            prompt_token_ids = event.prompt_token_ids or prompt_token_ids
            token_texts.update(event.token_texts)
    terminal = stream.terminal or Terminal(FinishReason.ERROR)
    return JobResult(
        job_id=stream.job_id,
        outputs=tuple(drafts[index].output(index) for index in sorted(drafts)),
        usage=terminal.usage,
        timings=terminal.timings,
        attempts=terminal.attempts,
        prompt_logprobs=prompt_logprobs,
        token_texts=token_texts,
        prompt_token_ids=prompt_token_ids,
    )
