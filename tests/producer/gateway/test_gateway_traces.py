"""One trace of a request, from the caller's span through gateway and worker, as exporters send it.

`tests/integration/test_traces.py` has the same with real processes, a preemption and a take-over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from inferq import AsyncClient, Client, SamplingParams
from inferq.protocol.trace_context import TraceContext
from inferq.runtime.logs import configure_logging
from inferq.runtime.spans import Tracing

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
SERVER, PRODUCER, CONSUMER = 2, 4, 5
SECRET = "zebra-in-the-prompt"
OF_A_JOB = {"queue", "tokenize", "prefill", "decode"}


@pytest.fixture
def tracing(collector: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracing]:
    """What a worker of its own process would have."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    tracing = Tracing.start("inferq-worker", f"{collector.url}/v1/traces")
    yield tracing
    tracing.close()


@pytest.fixture
def worker(start_stand_in: Callable[..., Any], tracing: Tracing) -> Any:
    return start_stand_in(tracing=tracing)


@pytest.fixture
def traced(worker: Any, start_gateway: Callable[..., Any], collector: Any) -> Any:
    """A gateway that makes traces, before a worker that does."""
    return start_gateway(tracing_endpoint=collector.url)


def ask(
    gateway: Any, *, stream: bool = True, headers: dict[str, str] = SAMPLED, **body: Any
) -> str:
    asked = {
        "model": "stand-in",
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 8,
        "temperature": 0.5,
        "stream": stream,
        **body,
    }
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=asked, headers=headers)
    assert answer.status_code == 200
    return answer.headers["X-Inferq-Job-Id"]


def names(spans: list[Any]) -> list[str]:
    return [span.name for span in spans]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_one_trace_from_its_head_to_its_last_byte(
    traced: Any, collector: Any, queue: str, stream: bool
) -> None:
    job_id = ask(traced, stream=stream)
    server = "POST /v1/chat/completions"
    wanted = OF_A_JOB | {server, f"send {queue}", f"process {queue}"}
    spans = collector.wait_for(lambda spans: wanted <= set(names(spans)))
    assert sorted(names(spans)) == sorted(wanted)
    by_name = {span.name: span for span in spans}
    assert {span.trace_id for span in spans} == {TRACE}
    parents = {name: span.parent_id for name, span in by_name.items()}
    request, sent, done = (by_name[n] for n in (server, f"send {queue}", f"process {queue}"))
    assert parents == {
        server: CALLER,
        sent.name: request.span_id,
        "queue": sent.span_id,
        done.name: sent.span_id,
        **dict.fromkeys(("tokenize", "prefill", "decode"), done.span_id),
    }
    assert [request.kind, sent.kind, done.kind] == [SERVER, PRODUCER, CONSUMER]
    assert [request.service, sent.service, done.service] == ["inferq-gateway"] * 2 + [
        "inferq-worker"
    ]
    assert done.attributes["messaging.message.id"] == job_id
    assert request.attributes["inferq.job_ids"] == [job_id]
    assert [name for name, _ in request.events] == ["first byte"]


def test_the_parts_lie_within_each_other_and_follow_each_other(
    traced: Any, collector: Any, queue: str
) -> None:
    ask(traced)
    spans = collector.wait_for(lambda spans: len(spans) == 7)
    by_name = {span.name: span for span in spans}
    request, done = by_name["POST /v1/chat/completions"], by_name[f"process {queue}"]
    sent, waited = by_name[f"send {queue}"], by_name["queue"]
    parts = [by_name[name] for name in ("tokenize", "prefill", "decode")]
    assert all(span.start <= span.end for span in spans)
    assert request.start <= sent.start <= sent.end <= request.end
    assert waited.end == done.start
    for part in parts:
        assert done.start <= part.start <= part.end <= done.end
    assert [a.end <= b.start for a, b in pairwise(parts)] == [True, True]
    assert parts[-1].end <= request.end  # its last byte is sent after its last token


def test_attributes_follow_the_conventions_and_hold_no_text(
    traced: Any, worker: Any, collector: Any, queue: str
) -> None:
    worker.say("A giraffe.")
    ask(traced, stop=["a stop word"], n=2)
    spans = collector.wait_for(lambda spans: len(spans) == 7)
    [done] = [span for span in spans if span.kind == CONSUMER]
    told = done.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "stand-in"
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.temperature"]) == (8, 0.5)
    assert told["gen_ai.request.choice.count"] == 2
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["gen_ai.usage.input_tokens"] > 5
    assert told["gen_ai.usage.output_tokens"] > 2
    assert told["inferq.attempt"] == 1
    everything = json.dumps([[span.attributes, span.events, span.name] for span in spans])
    assert not [text for text in (SECRET, "giraffe", "stop word") if text in everything]


def test_what_the_engine_tells_of_a_request_becomes_events_of_its_part(
    traced: Any, worker: Any, collector: Any
) -> None:
    from inferq.worker.engine.requests.request_events import EventKind, RequestEvent

    worker.slow_down(0.05)
    happened = (EventKind.RUNNING, EventKind.DROPPED, EventKind.RUNNING, EventKind.SWAPPED)

    def tell() -> None:
        [request_id] = worker.engine._running
        worker.engine.on_events(
            [RequestEvent(request_id, 0, kind, 1.0 + k) for k, kind in enumerate(happened)]
        )

    url = f"{traced.url}/v1/completions"
    body = {"model": "stand-in", "prompt": "x", "max_tokens": 600, "stream": True}
    with httpx.stream("POST", url, json=body, headers=SAMPLED) as answer:
        lines = answer.iter_lines()
        next(lines)
        worker._thread.call(tell)
        worker.slow_down(0.0)
        assert "[DONE]" in [*lines][-2]
    spans = collector.wait_for(lambda spans: len(spans) == 7)
    [decode] = [span for span in spans if span.name == "decode"]
    assert [name for name, _ in decode.events] == ["scheduled", "preempted", "resumed", "preempted"]
    assert [e["inferq.preemption"] for n, e in decode.events if n == "preempted"] == [
        "recompute",
        "swap",
    ]


def test_a_caller_that_does_not_sample_has_no_spans_anywhere(
    traced: Any, worker: Any, collector: Any
) -> None:
    ask(traced, headers={"traceparent": f"00-{'a' * 32}-{CALLER}-00"})
    ask(traced)
    spans = collector.wait_for(lambda spans: len(spans) == 7)
    assert {span.trace_id for span in spans} == {TRACE}


@pytest.mark.parametrize("parent", ["", "00-zz-1-01", f"00-{'0' * 32}-{CALLER}-01", "x" * 4000])
def test_a_malformed_context_of_the_caller_begins_a_trace_of_its_own(
    traced: Any, collector: Any, parent: str
) -> None:
    ask(traced, headers={"traceparent": parent, "tracestate": "?"})
    spans = collector.wait_for(lambda spans: len(spans) == 7)
    assert len({span.trace_id for span in spans}) == 1
    assert [span.parent_id for span in spans if span.kind == SERVER] == [""]


@pytest.mark.parametrize(("number", "named"), [(64, 64), (65, 1)])
def test_very_many_jobs_are_named_by_the_first(
    traced: Any, collector: Any, capfd: pytest.CaptureFixture[str], number: int, named: int
) -> None:
    configure_logging("info", "json")
    asked = {"model": "stand-in", "prompt": ["x"] * number, "max_tokens": 1}
    answer = httpx.post(f"{traced.url}/v1/completions", json=asked, timeout=60)
    listed = answer.headers["X-Inferq-Job-Id"]
    assert len(listed.split(",")) == named
    spans = collector.wait_for(lambda spans: "POST /v1/completions" in names(spans))
    [span] = [span for span in spans if span.name == "POST /v1/completions"]
    assert span.attributes["inferq.job_ids"] == listed.split(",")
    rows = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    [row] = [row for row in rows if row["event"] == "request"]
    assert row["job_id"] == listed


@pytest.mark.parametrize(
    ("method", "told"), [("GET", "GET"), ("PUT", "PUT"), ("PROPFIND", "_OTHER")]
)
def test_a_method_that_http_does_not_have_is_not_told(
    traced: Any, collector: Any, method: str, told: str
) -> None:
    httpx.request(method, f"{traced.url}/v1/nothing")
    [span] = collector.wait_for(bool)
    assert (span.name, span.attributes["http.request.method"]) == (told, told)


def test_a_refused_request_has_a_span_with_its_status_and_none_of_a_job(
    traced: Any, collector: Any
) -> None:
    for path in ("/livez", "/metrics", "/status", "/status/queues"):
        httpx.get(f"{traced.url}{path}")  # asked all the time: no spans
    answer = httpx.post(f"{traced.url}/v1/completions", json={"model": "unknown", "prompt": "x"})
    assert answer.status_code == 404
    [span] = collector.wait_for(bool)
    assert (span.name, span.attributes["http.response.status_code"]) == (
        "POST /v1/completions",
        404,
    )


def test_a_job_without_a_trace_begins_one_that_has_the_jobs_own_id(
    worker: Any, collector: Any, valkey_url: str, queue: str
) -> None:
    with Client(valkey_url, queue=queue) as client:
        job = client.submit("x", SamplingParams(max_tokens=2))
        job.result(timeout_s=60)
    spans = collector.wait_for(lambda spans: f"process {queue}" in names(spans))
    assert {span.trace_id for span in spans} == {job.id[:32]}
    [done] = [span for span in spans if span.name == f"process {queue}"]
    assert {span.parent_id for span in spans if span is not done} == {done.span_id}


async def test_the_sdk_goes_on_from_the_programs_current_span(
    worker: Any, collector: Any, valkey_url: str, queue: str
) -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("program")
    own = []
    async with AsyncClient(valkey_url, queue) as client:
        with tracer.start_as_current_span("program") as span:
            own.append(span.get_span_context())
            first = await client.submit("x", SamplingParams(max_tokens=2))
        await first.result(timeout_s=60)
    with Client(valkey_url, queue=queue) as plain:
        with tracer.start_as_current_span("program") as span:
            own.append(span.get_span_context())
            plain.submit("x", SamplingParams(max_tokens=2)).result(timeout_s=60)
        given = TraceContext(f"00-{TRACE}-{CALLER}-01")
        plain.submit("x", SamplingParams(max_tokens=2), trace_context=given).result(timeout_s=60)

    def of_jobs(spans: list[Any]) -> list[Any]:
        return [span for span in spans if span.kind == CONSUMER]

    spans = of_jobs(collector.wait_for(lambda spans: len(of_jobs(spans)) == 3))
    parents = [(f"{c.trace_id:032x}", f"{c.span_id:016x}") for c in own]
    assert {(span.trace_id, span.parent_id) for span in spans} == {*parents, (TRACE, CALLER)}
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_without_an_endpoint_nothing_of_a_trace_is_on_the_wire(
    gateway: Any, valkey_url: str, queue: str, stand_in_worker: Any
) -> None:
    seen: list[Any] = []
    add = stand_in_worker.engine.add

    def watch(*arguments: Any, **options: Any) -> None:
        seen.append(options["traced"])
        add(*arguments, **options)

    stand_in_worker.engine.add = watch
    ask(gateway)
    assert seen == [False]
    assert gateway.app.state.gateway.tracing is None
