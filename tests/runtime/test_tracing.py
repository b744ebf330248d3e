"""Whether a process makes traces, and what becomes of them when the collector is not well."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import structlog

from inferq.protocol.errors import InvalidRequestError, MissingExtraError
from inferq.protocol.trace_context import TraceContext
from inferq.runtime.spans import Tracing
from inferq.runtime.tracing import is_wanted, start_tracing, traces_url

PARENT = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "vendor=1")
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", ENDPOINT, "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


@pytest.mark.parametrize(
    ("endpoint", "variables", "wanted"),
    [
        (None, {}, False),
        ("http://c:4318", {}, True),
        (None, {ENDPOINT: "http://c:4318"}, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        (None, {ENDPOINT: ""}, False),
        ("http://c:4318", {"OTEL_SDK_DISABLED": "true"}, False),
        ("http://c:4318", {"OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_traces_are_made_only_where_somebody_says_where_to(
    endpoint: str | None, variables: dict[str, str], wanted: bool
) -> None:
    assert is_wanted(endpoint, variables) is wanted


@pytest.mark.parametrize("given", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_an_endpoint_is_a_base_or_the_whole_address(given: str) -> None:
    assert traces_url(given) == "http://c:4318/v1/traces"


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_TRACES_EXPORTER", "console")],
)
def test_what_cannot_be_done_is_refused_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidRequestError, match=name):
        start_tracing("s", "http://127.0.0.1:1")


def test_a_bad_size_of_the_queue_of_spans_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(InvalidRequestError, match="OTEL_"):
        start_tracing("s", "http://127.0.0.1:1")


def test_without_the_packages_a_setting_is_an_error_and_a_variable_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "inferq.runtime.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    assert start_tracing("s", None) is None
    with pytest.raises(MissingExtraError, match=r"pip install 'inferq\[tracing\]'"):
        start_tracing("s", "http://127.0.0.1:1")


def test_a_span_arrives_with_its_parent_service_and_attributes(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    tracing = Tracing.start("some-service", f"{collector.url}/v1/traces", instance="one")
    span = tracing.span("work", parent=PARENT, attributes={"a": 1})
    child = span.child("part")
    child.event("seen", {"b": "x"})
    child.fail("broken")
    child.end()
    span.end()
    tracing.close()
    part, work = sorted(collector.spans, key=lambda s: s.name)
    assert (work.service, work.trace_id, work.parent_id) == (
        "some-service",
        PARENT.trace_id,
        PARENT.span_id,
    )
    assert work.attributes == {"a": 1}
    assert (part.parent_id, part.trace_id) == (work.span_id, work.trace_id)
    assert (part.status, part.attributes) == (2, {"error.type": "broken"})
    assert part.events == [("seen", {"b": "x"})]
    assert span.context.tracestate == "vendor=1"


def test_the_services_name_may_be_given_by_opentelemetrys_variable(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = Tracing.start("theirs", f"{collector.url}/v1/traces")
    tracing.span("work").end()
    tracing.close()
    assert [span.service for span in collector.spans] == ["mine"]


def test_a_caller_that_does_not_sample_has_no_spans_and_the_context_goes_on(
    collector: Any,
) -> None:
    tracing = Tracing.start("s", f"{collector.url}/v1/traces")
    caller = TraceContext(f"00-{PARENT.trace_id}-{PARENT.span_id}-00")
    span = tracing.span("work", parent=caller)
    assert not span.is_recording
    assert span.context.trace_id == caller.trace_id
    assert not span.child("part").context.is_sampled
    span.end()
    tracing.close()
    assert collector.num_requests == 0


def test_a_sampler_of_opentelemetrys_variables_decides_about_new_traces(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    tracing = Tracing.start("s", f"{collector.url}/v1/traces")
    low, high = "f" * 16 + "0" * 15 + "1", "f" * 32
    assert [tracing.span("w", trace_id=t).is_recording for t in (low, high)] == [True, False]
    tracing.close()


def test_a_given_id_is_that_of_one_trace_only(collector: Any) -> None:
    tracing = Tracing.start("s", f"{collector.url}/v1/traces")
    wanted = "ab" * 16
    assert tracing.span("w", trace_id=wanted).context.trace_id == wanted
    assert tracing.span("w").context.trace_id != wanted
    assert tracing.span("w", parent=PARENT, trace_id=wanted).context.trace_id == PARENT.trace_id
    assert tracing.span("w").context.trace_id != wanted
    tracing.close()


def test_a_collector_that_fails_is_told_of_once_and_that_it_is_back_too(collector: Any) -> None:
    collector.status = 400
    with structlog.testing.capture_logs() as lines:
        tracing = Tracing.start("s", f"{collector.url}/v1/traces")
        for number in range(3):
            tracing.span("lost").end()
            _wait_for(lambda number=number: collector.num_requests > number)
        collector.status = 200
        tracing.span("kept").end()
        collector.wait_for(lambda spans: [span.name for span in spans] == ["kept"])
        tracing.close()
    assert [(line["log_level"], line["event"].split(":")[0]) for line in lines] == [
        ("warning", "traces are not exported"),
        ("info", "traces are exported again"),
    ]
    assert lines[-1]["spans_lost"] == 3


def test_spans_that_find_the_queue_full_are_told_of_too(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with structlog.testing.capture_logs() as lines:
        tracing = Tracing.start("s", f"{collector.url}/v1/traces")
        for _ in range(5000):
            tracing.span("many").end()
        tracing.close()
    assert lines[0]["event"] == "traces are not exported"
    assert "slower" in lines[0]["why"]
    assert lines[-1]["event"] == "traces are exported again"
    assert sum(line.get("spans_lost", 0) for line in lines) + len(collector.spans) >= 5000


FLOOD = """
import sys
from inferq.runtime.logs import configure_logging
from inferq.runtime.spans import Tracing

configure_logging("debug", "json")
tracing = Tracing.start("s", sys.argv[1] + "/v1/traces")
for _ in range(20_000):
    tracing.span("work").end()
tracing.close()
"""


def test_a_collector_that_is_away_or_silent_costs_one_line_and_delays_no_end(
    collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.delay_s = 1000.0
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1000")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
    processes = [
        subprocess.Popen([sys.executable, "-c", FLOOD, url], stderr=subprocess.PIPE, text=True)
        for url in (nowhere, collector.url)
    ]
    for process in processes:
        _, said = process.communicate(timeout=100)
        assert process.returncode == 0
        lines = [json.loads(line)["event"] for line in said.splitlines()]
        assert lines == ["traces are not exported"]


def _wait_for(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)
