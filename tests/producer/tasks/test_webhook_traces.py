"""The delivery of a webhook is a part of its job's trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inferq import Client, TraceContext, Webhook
from inferq.producer.tasks.command import run_burst
from inferq.producer.tasks.sending import Sender

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
CLIENT = 3


@pytest.fixture
def end_traced(sync_client: Client, worker_thread: Any, receiver: Any) -> Callable[..., str]:
    """Submits a job with a webhook in a trace, serves it, and returns its id."""

    def end(trace: TraceContext | None) -> str:
        job = sync_client.submit("x", webhook=Webhook(receiver.url), trace_context=trace)
        worker_thread.serve_next(3)
        return job.id

    return end


def test_each_try_is_a_span_of_the_jobs_trace_which_the_receiver_may_go_on_from(
    end_traced: Any, burst_until: Any, make_settings: Any, make_answer: Any, receiver: Any,
    collector: Any,
) -> None:  # fmt: skip
    receiver.answers = [make_answer(503), make_answer(200)]
    job_id = end_traced(TraceContext(f"00-{TRACE}-{CALLER}-01", "vendor=1"))
    burst_until(lambda: len(receiver.got) == 2, make_settings(tracing_endpoint=collector.url))
    spans = collector.wait_for(lambda spans: len(spans) == 2)
    failed, delivered = sorted(spans, key=lambda span: span.start)
    for span in spans:
        assert (span.service, span.name, span.kind) == ("inferq-tasks", "webhook", CLIENT)
        assert (span.trace_id, span.parent_id) == (TRACE, CALLER)
        assert span.attributes["messaging.message.id"] == job_id
    assert [span.attributes["inferq.attempt"] for span in (failed, delivered)] == [1, 2]
    assert (failed.attributes["error.type"], failed.status) == ("503", 2)
    assert (delivered.attributes["http.response.status_code"], delivered.status) == (200, 0)
    sent = [headers["traceparent"] for headers, _ in receiver.got]
    assert sent == [f"00-{TRACE}-{span.span_id}-01" for span in (failed, delivered)]


def test_a_job_in_no_trace_has_the_delivery_in_its_own(
    end_traced: Any, burst_until: Any, make_settings: Any, receiver: Any, collector: Any
) -> None:
    job_id = end_traced(None)
    burst_until(lambda: receiver.got, make_settings(tracing_endpoint=collector.url))
    [span] = collector.wait_for(bool)
    assert span.trace_id == job_id[:32]


def test_a_try_that_fails_by_a_fault_of_ours_is_a_span_that_ended(
    end_traced: Any, make_settings: Any, collector: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    end_traced(TraceContext(f"00-{TRACE}-{CALLER}-01"))

    async def fail(*_: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(Sender, "send", fail)
    run_burst(make_settings(tracing_endpoint=collector.url))
    [span] = collector.wait_for(bool)
    assert (span.attributes["error.type"], span.status) == ("RuntimeError", 2)
    assert span.trace_id == TRACE


def test_without_tracing_the_receiver_gets_no_trace(
    end_traced: Any, burst_until: Any, receiver: Any
) -> None:
    end_traced(TraceContext(f"00-{TRACE}-{CALLER}-01"))
    burst_until(lambda: receiver.got)
    [(headers, _)] = receiver.got
    assert "traceparent" not in headers
