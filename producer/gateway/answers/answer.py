"""The body of a response that is not streamed: the same deltas, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from inferq.producer import StreamEvent
from inferq.producer.gateway.answers.choices import Delta, JobChoices
from inferq.producer.gateway.answers.chunks import created_s, response_id, usage_body
from inferq.producer.gateway.answers.event_writer import total_usage
from inferq.producer.gateway.answers.logprob_shapes import join_completion_logprobs
from inferq.producer.gateway.answers.note import Kind, Note
from inferq.producer.gateway.tools.tool_deltas import Part, assemble

_OBJECTS: Final = {Kind.COMPLETION: "text_completion", Kind.CHAT: "chat.completion"}


@dataclass(slots=True)
class _Draft:
    """One choice while its deltas come in."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        if delta.text:
            self.parts.append(delta.text)
        self.parts.extend(delta.tool_calls)
        if delta.logprobs is not None:
            self.logprobs.append(delta.logprobs)
        self.token_ids.extend(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


class JobAnswer:
    """The choices of one job, from its events from the first on."""

    def __init__(self, choices: JobChoices) -> None:
        self.choices = choices
        self._drafts: list[_Draft] | None = None

    def feed(self, event: StreamEvent) -> None:
        """Take the next event."""
        if self._drafts is None:
            self._drafts = [_Draft() for _ in range(self.choices.note.n)]
            for draft, opening in zip(self._drafts, self.choices.opening(event), strict=False):
                draft.add(opening)
        self._drafts[event.index].add(self.choices.feed(event))

    def body(self) -> list[dict[str, Any]]:
        """Return the choices."""
        note = self.choices.note
        first = note.position * note.n
        return [
            self._completion(first + k, draft)
            if note.kind is Kind.COMPLETION
            else self._chat(first + k, draft)
            for k, draft in enumerate(self._drafts or ())
        ]

    def _completion(self, index: int, draft: _Draft) -> dict[str, Any]:
        note = self.choices.note
        text, _ = assemble(draft.parts)
        choice = self._choice(index, {"text": text}, draft)
        if note.logprobs is not None:
            choice["logprobs"] = join_completion_logprobs(draft.logprobs)
        if note.prompt_logprobs:
            choice["prompt_logprobs"] = self.choices.prompt_logprobs
        if note.token_ids:
            choice["prompt_token_ids"] = self.choices.prompt_token_ids
        return choice

    def _chat(self, index: int, draft: _Draft) -> dict[str, Any]:
        content, calls = assemble(draft.parts)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls is not None:
            message["tool_calls"] = calls
        choice = self._choice(index, {"message": message}, draft)
        if self.choices.note.logprobs is not None:
            tokens = [token for piece in draft.logprobs for token in piece]
            choice["logprobs"] = {"content": tokens, "refusal": None}
        return choice

    def _choice(self, index: int, content: dict[str, Any], draft: _Draft) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            **content,
            "logprobs": None,
            "finish_reason": draft.finish_reason,
            "stop_reason": draft.stop_reason,
        }
        if self.choices.note.token_ids:
            choice["token_ids"] = draft.token_ids
        return choice


def response_body(note: Note, job_id: str, answers: Sequence[JobAnswer]) -> dict[str, Any]:
    """Return the whole response, whose first job and its note are given."""
    body = {
        "id": response_id(note.kind, job_id),
        "object": _OBJECTS[note.kind],
        "created": created_s(job_id),
        "model": note.model,
        "choices": [choice for answer in answers for choice in answer.body()],
        "usage": usage_body(total_usage(answer.choices.usage for answer in answers)),
    }
    if note.kind is Kind.CHAT:
        choices = answers[0].choices
        if note.prompt_logprobs:
            body["prompt_logprobs"] = choices.prompt_logprobs
        if note.token_ids:
            body["prompt_token_ids"] = choices.prompt_token_ids
    return body
