"""The choices of one job's response, as they grow: a pure function of its note and its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inferq.producer import StreamEvent
from inferq.producer.gateway.answers.logprob_shapes import (
    CompletionLogprobs,
    chat_logprobs,
    prompt_logprobs,
)
from inferq.producer.gateway.answers.note import Kind, Note
from inferq.producer.gateway.tools.offered_tools import ToolParser, ToolPlan
from inferq.producer.gateway.tools.tool_deltas import ToolDelta
from inferq.protocol.messages import FinishReason, Usage


@dataclass(slots=True)
class Delta:
    """What one event adds to one choice.

    `logprobs` are in the shape of the response's kind; `usage` counts this choice so far.
    """

    index: int
    text: str = ""
    tool_calls: Sequence[ToolDelta] = ()
    logprobs: Any = None
    token_ids: Sequence[int] = ()
    prompt_token_ids: Sequence[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None

    @property
    def is_text_only(self) -> bool:
        """Whether there is nothing beside text, which it mostly is."""
        return (
            not self.tool_calls
            and self.logprobs is None
            and not self.token_ids
            and self.usage is None
            and self.prompt_token_ids is None
        )

    @property
    def has_content(self) -> bool:
        """Whether a chunk has anything to tell, apart from the end."""
        return bool(self.text or self.tool_calls or self.logprobs is not None or self.token_ids)


class JobChoices:
    """Turns the events of one job, from the first on and in order, into deltas of its choices.

    `echo_text` is the prompt where the choices begin with it, and may be set until the first event.
    """

    def __init__(self, note: Note, job_id: str, *, echo_text: str | None = None) -> None:
        self.note = note
        self.job_id = job_id
        self.echo_text = note.echo_text if echo_text is None else echo_text
        self.usage = Usage()
        #: vLLM's `prompt_logprobs` of this prompt, once they are there.
        self.prompt_logprobs: list[dict[str, Any] | None] | None = None
        self.prompt_token_ids: tuple[int, ...] | None = None
        self._first_index = note.position * note.n
        self._counts = [0] * note.n
        self._legacy: list[CompletionLogprobs] = []
        if note.kind is Kind.COMPLETION and note.logprobs is not None:
            self._legacy = [CompletionLogprobs(note.logprobs) for _ in range(note.n)]
        self._parsers: list[ToolParser] = []
        if note.tools is not None:
            plan = ToolPlan.from_note(note.tools)
            self._parsers = [plan.parser(job_id, index) for index in range(note.n)]

    @property
    def needs_echo(self) -> bool:
        """Whether `echo_text` must be set before the first event."""
        return self.note.echo and self.echo_text is None

    def opening(self, first: StreamEvent) -> list[Delta]:
        """Return what each choice begins with, from the job's first event.

        A chat's is its role alone; a completion has one only where the prompt is shown.
        """
        note = self.note
        self.prompt_token_ids = first.prompt_token_ids
        if note.prompt_logprobs and first.prompt_logprobs is not None:
            self.prompt_logprobs = prompt_logprobs(
                first.prompt_token_ids or (), first.prompt_logprobs, first.token_texts
            )
        if note.kind is Kind.COMPLETION and not (note.echo or note.token_ids):
            return []
        return [self._opening(index, first) for index in range(note.n)]

    def feed(self, event: StreamEvent) -> Delta:
        """Return what the next event adds."""
        note, index = self.note, event.index
        delta = Delta(self._first_index + index)
        self._counts[index] += len(event.token_ids)
        if event.usage is not None:
            self.usage = event.usage
            if note.prompt_only:
                self.usage = Usage(event.usage.prompt_tokens, event.usage.cached_tokens, 0)
        if not note.prompt_only:
            self._add_content(delta, event)
        if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._add_end(delta, event, event.finish_reason)
        if note.continuous_usage:
            delta.usage = self._usage_of(index)
        return delta

    def _opening(self, index: int, first: StreamEvent) -> Delta:
        note = self.note
        delta = Delta(self._first_index + index)
        if note.token_ids:
            delta.prompt_token_ids = first.prompt_token_ids or ()
        if note.continuous_usage:
            delta.usage = self._usage_of(index)
        if note.echo:
            delta.text = self.echo_text or ""
            if self._legacy and first.prompt_logprobs is not None:
                delta.logprobs = self._legacy[index].piece(
                    first.prompt_token_ids or (), first.prompt_logprobs, first.token_texts
                )
        return delta

    def _add_content(self, delta: Delta, event: StreamEvent) -> None:
        note = self.note
        if note.token_ids:
            delta.token_ids = event.token_ids
        if note.logprobs is not None and event.logprobs is not None:
            tokens = (event.token_ids, event.logprobs, event.token_texts)
            if self._legacy:
                delta.logprobs = self._legacy[event.index].piece(*tokens)
            else:
                delta.logprobs = chat_logprobs(*tokens)
        if not self._parsers:
            delta.text = event.text
            return
        parser = self._parsers[event.index]
        parts = [*parser.feed(event.text)]
        if event.finish_reason is not None:
            parts += parser.finish(is_cut=event.finish_reason is FinishReason.LENGTH)
        delta.text = "".join(part for part in parts if isinstance(part, str))
        delta.tool_calls = [part for part in parts if isinstance(part, ToolDelta)]

    def _add_end(self, delta: Delta, event: StreamEvent, reason: FinishReason) -> None:
        if self.note.prompt_only:
            delta.finish_reason = FinishReason.LENGTH.value
            return
        delta.finish_reason = reason.value
        delta.stop_reason = event.stop_reason
        if self._parsers:
            delta.finish_reason = self._parsers[event.index].finish_reason(reason.value)

    def _usage_of(self, index: int) -> Usage:
        completion = 0 if self.note.prompt_only else self._counts[index]
        return Usage(len(self.prompt_token_ids or ()), 0, completion)
