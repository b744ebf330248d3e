"""The spans of one job's way through a worker, made of what the I/O side sees anyway.

Attributes follow OpenTelemetry's conventions for messaging and generative AI where these fit, and
begin with `inferq.` elsewhere. None ever holds a prompt, a text or a message of an error.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from inferq.protocol.messages import Job, Task, Terminal
from inferq.protocol.params import SamplingParams
from inferq.protocol.prompts import ChatPrompt
from inferq.protocol.trace_context import trace_id_of
from inferq.runtime.tracing import Kind
from inferq.worker.engine.requests.request_events import EventKind, RequestEvent
from inferq.worker.queue.running import RunningJob

if TYPE_CHECKING:
    from inferq.runtime.spans import Attribute, Span, Tracing

#: What a preemption did, by the engine's event.
_PREEMPTIONS: Final = {EventKind.DROPPED: "recompute", EventKind.SWAPPED: "swap"}


class JobTrace:
    """What is known of a job's trace in this worker, from its claim to its end here.

    Spans end as soon as what they are about does, so that a worker that is killed has exported
    all but what it was in.
    """

    def __init__(self, span: Span) -> None:
        self._span = span
        self._phase: Span | None = None
        self._preempted: set[int] = set()

    def tokenized(self, began_ns: int, prompt_tokens: int) -> None:
        """Record that the prompt's tokens are known; it was begun at `began_ns`."""
        tokens = {"gen_ai.usage.input_tokens": prompt_tokens}
        self._span.child("tokenize", start_ns=began_ns, attributes=tokens).end()

    def begin_prefill(self) -> None:
        """Record that the engine has the request."""
        self._phase = self._span.child("prefill")

    def begin_decode(self, cached_tokens: int) -> None:
        """Record that the first token is there."""
        now_ns = time.time_ns()
        if self._phase is not None:
            self._phase.set({"gen_ai.usage.cache_read.input_tokens": cached_tokens})
            self._phase.end(now_ns)
        self._phase = self._span.child("decode", start_ns=now_ns)

    def follow(self, event: RequestEvent) -> None:
        """Record what the engine says of the request."""
        where = self._phase or self._span
        at_ns = int(event.at * 1e9)
        attributes: dict[str, Attribute] = {"inferq.output": event.index}
        if means := _PREEMPTIONS.get(event.kind):
            self._preempted.add(event.index)
            where.event("preempted", {**attributes, "inferq.preemption": means}, at_ns)
        elif event.index in self._preempted:
            self._preempted.remove(event.index)
            where.event("resumed", attributes, at_ns)
        else:
            where.event("scheduled", attributes, at_ns)

    def end_generation(self) -> None:
        """Record that nothing more is generated here."""
        if self._phase is not None:
            self._phase.end()
            self._phase = None

    def end(self, terminal: Terminal) -> None:
        """Record that the server has the job's end."""
        self.end_generation()
        usage = terminal.usage
        self._span.set(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.response.finish_reasons": [terminal.finish_reason.value],
            }
        )
        if terminal.error is not None:
            self._span.fail(terminal.error.code)
        self._span.end()

    def fail(self, code: str) -> None:
        """Record that the job could not be read."""
        self.end_generation()
        self._span.fail(code)
        self._span.end()

    def leave(self, event: str, offset: int) -> None:
        """Record that another worker goes on with the job, from a token of it on."""
        self.end_generation()
        self._span.event(event, {"inferq.offset": offset})
        self._span.end()


class JobTraces:
    """The traces of the jobs that a worker holds; does nothing for those that are not sampled."""

    def __init__(self, tracing: Tracing | None, *, queue: str, model: str) -> None:
        self._tracing = tracing
        self._queue = queue
        self._model = model
        self._traces: dict[RunningJob, JobTrace] = {}

    def begin(self, job: RunningJob, message: Job) -> None:
        """Begin the spans of a job that was just claimed, if its trace is sampled.

        A job that is in no trace begins one, whose id is the job's own: each worker that takes the
        job over finds it.
        """
        job.trace_id = None if message.trace is None else message.trace.trace_id
        if self._tracing is None:
            return
        now_ns = time.time_ns()
        claimed_ns = now_ns - int((time.monotonic() - job.claimed_at) * 1e9)
        span = self._tracing.span(
            f"process {self._queue}",
            Kind.CONSUMER,
            parent=message.trace,
            trace_id=trace_id_of(message.id),
            start_ns=claimed_ns,
            attributes=_attributes(message, job, self._queue, self._model),
        )
        if span.is_recording:
            job.trace_id = span.context.trace_id
            self._tell_wait(self._tracing, span, message, job, claimed_ns)
            self._traces[job] = JobTrace(span)

    def of(self, job: RunningJob) -> JobTrace | None:
        """Return the trace of a job, if there is one."""
        return self._traces.get(job)

    def end(self, job: RunningJob, terminal: Terminal) -> None:
        """Record that the server has a job's end."""
        if trace := self._traces.pop(job, None):
            trace.end(terminal)

    def fail(self, job: RunningJob, code: str) -> None:
        """Record that a job ended here as one that cannot be read."""
        if trace := self._traces.pop(job, None):
            trace.fail(code)

    def leave(self, job: RunningJob, event: str) -> None:
        """Record that the job is no longer ours; nothing if that was recorded."""
        if trace := self._traces.pop(job, None):
            trace.leave(event, job.acknowledged)

    @staticmethod
    def _tell_wait(
        tracing: Tracing, span: Span, message: Job, job: RunningJob, claimed_ns: int
    ) -> None:
        if job.attempts > 1:
            resumed = {"inferq.attempt": job.attempts, "inferq.offset": job.inherited}
            span.event("taken over", resumed, claimed_ns)
            return
        waiting = tracing.span(
            "queue",
            parent=message.trace or span.context,
            start_ns=claimed_ns - job.queued_ms * 1_000_000,
            attributes={"inferq.lane": job.lane.value, "messaging.message.id": job.id},
        )
        waiting.end(claimed_ns)


def _attributes(message: Job, job: RunningJob, queue: str, model: str) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "messaging.system": "inferq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": queue,
        "messaging.message.id": job.id,
        "gen_ai.operation.name": _operation(message),
        "gen_ai.provider.name": "inferq",
        "gen_ai.request.model": message.model or model,
        "gen_ai.response.model": model,
        "inferq.lane": job.lane.value,
        "inferq.attempt": job.attempts,
    }
    if message.task is Task.GENERATE:
        attributes |= _sampling(message.params)
    return attributes


def _operation(message: Job) -> str:
    if message.task is not Task.GENERATE:
        return message.task.value
    return "chat" if isinstance(message.prompt, ChatPrompt) else "text_completion"


def _sampling(params: SamplingParams) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if params.top_k > 0:
        attributes["gen_ai.request.top_k"] = params.top_k
    if params.n > 1:
        attributes["gen_ai.request.choice.count"] = params.n
    return attributes
