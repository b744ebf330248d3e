"""The spans of a job in one worker, whatever becomes of it there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from inferq.protocol.errors import ErrorInfo
from inferq.protocol.keys import Lane, new_job_id
from inferq.protocol.messages import FinishReason, Job, Task, Terminal
from inferq.protocol.params import SamplingParams
from inferq.protocol.prompts import TextPrompt
from inferq.protocol.trace_context import TraceContext
from inferq.runtime.spans import Tracing
from inferq.worker.jobs.job_trace import JobTraces
from inferq.worker.queue.running import RunningJob

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = TraceContext(f"00-{TRACE}-00f067aa0ba902b7-01")


@pytest.fixture
def tracing(collector: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracing]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    tracing = Tracing.start("inferq-worker", f"{collector.url}/v1/traces")
    yield tracing
    tracing.close()


@pytest.fixture
def traces(tracing: Tracing) -> JobTraces:
    return JobTraces(tracing, queue="q", model="m")


def running(*, attempts: int = 1, published: int = 0) -> RunningJob:
    return RunningJob(
        id=new_job_id(),
        epoch=attempts,
        lane=Lane.LOW,
        attempts=attempts,
        queued_ms=1500,
        reserved=16,
        claimed_at=time.monotonic(),
        lease_until=time.monotonic() + 9,
        acknowledged=published,
        inherited=published,
    )


def message(job: RunningJob, trace: TraceContext | None = CALLER, **more: Any) -> Job:
    return Job(
        id=job.id, prompt=TextPrompt("x", True), params=SamplingParams(top_k=5), trace=trace, **more
    )


def test_the_wait_in_the_queue_is_a_span_that_ends_at_the_claim(
    traces: JobTraces, collector: Any
) -> None:
    job = running()
    traces.begin(job, message(job))
    traces.end(job, Terminal(FinishReason.STOP))
    done, waited = sorted(collector.wait_for(lambda s: len(s) == 2), key=lambda s: s.name)
    assert (done.name, waited.name) == ("process q", "queue")
    assert waited.end == done.start
    assert waited.end - waited.start == 1_500_000_000
    assert {done.parent_id, waited.parent_id} == {CALLER.span_id}
    assert done.attributes["inferq.lane"] == "low"
    assert done.attributes["gen_ai.request.top_k"] == 5


def test_another_attempt_says_from_which_token_it_goes_on_and_has_no_wait(
    traces: JobTraces, collector: Any
) -> None:
    job = running(attempts=3, published=7)
    traces.begin(job, message(job))
    job.acknowledged = 9
    traces.leave(job, "handed back")
    traces.leave(job, "lost")
    traces.end(job, Terminal(FinishReason.STOP))
    [span] = collector.wait_for(bool)
    assert span.events == [
        ("taken over", {"inferq.attempt": 3, "inferq.offset": 7}),
        ("handed back", {"inferq.offset": 9}),
    ]
    assert "gen_ai.response.finish_reasons" not in span.attributes


def test_a_failed_job_fails_its_span_by_the_code(traces: JobTraces, collector: Any) -> None:
    job = running(attempts=2)
    traces.begin(job, message(job))
    error = ErrorInfo("internal_error", "ValueError: what was asked")
    traces.end(job, Terminal(FinishReason.ERROR, error=error))
    [span] = collector.wait_for(bool)
    assert (span.status, span.attributes["error.type"]) == (2, "internal_error")
    assert "what was asked" not in str(span)


def test_the_parts_of_a_job_that_is_left_in_the_middle_end_with_it(
    traces: JobTraces, collector: Any
) -> None:
    job = running(attempts=2)
    traces.begin(job, message(job))
    trace = traces.of(job)
    assert trace is not None
    trace.begin_prefill()
    trace.begin_decode(4)
    traces.leave(job, "lost")
    spans = {span.name: span for span in collector.wait_for(lambda s: len(s) == 3)}
    assert spans["prefill"].end == spans["decode"].start
    assert spans["decode"].end <= spans["process q"].end
    assert spans["prefill"].attributes == {"gen_ai.usage.cache_read.input_tokens": 4}


def test_a_job_for_tokens_of_a_prompt_has_no_sampling(traces: JobTraces, collector: Any) -> None:
    job = running(attempts=2)
    traces.begin(job, message(job, task=Task.TOKENIZE))
    traces.end(job, Terminal(FinishReason.STOP))
    [span] = collector.wait_for(bool)
    assert span.attributes["gen_ai.operation.name"] == "tokenize"
    assert "gen_ai.request.temperature" not in span.attributes


def test_log_lines_know_the_trace_of_a_job_also_where_there_are_no_spans(
    traces: JobTraces,
) -> None:
    unsampled = TraceContext(f"00-{TRACE}-{CALLER.span_id}-00")
    for of_worker, trace, trace_id in (
        (JobTraces(None, queue="q", model="m"), CALLER, TRACE),
        (JobTraces(None, queue="q", model="m"), None, None),
        (traces, unsampled, TRACE),
    ):
        job = running()
        of_worker.begin(job, message(job, trace))
        assert of_worker.of(job) is None
        assert job.names == {"job_id": job.id, **({"trace_id": trace_id} if trace_id else {})}


def test_a_job_that_cannot_be_read_ends_its_span_as_failed(
    traces: JobTraces, collector: Any
) -> None:
    job = running(attempts=2)
    traces.begin(job, message(job))
    traces.fail(job, "undecodable")
    assert traces.of(job) is None
    [span] = collector.wait_for(bool)
    assert span.attributes["error.type"] == "undecodable"
