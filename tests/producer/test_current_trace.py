"""The SDK takes the program's current trace, and nothing of OpenTelemetry's for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import trace

from inferq.producer.tracing import current_trace

WITHOUT = """
import sys

sys.modules["opentelemetry"] = None  # as where it is not installed
import inferq
from inferq.producer.tracing import current_trace

inferq.Client
assert current_trace() is None
assert not [name for name in sys.modules if name.startswith("opentelemetry.")]
"""

CONTEXT = trace.SpanContext(
    trace_id=0xAB,
    span_id=0xCD,
    is_remote=False,
    trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    trace_state=trace.TraceState([("vendor", "1")]),
)


def test_where_opentelemetry_is_not_installed_there_is_no_trace_and_no_import() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], timeout=60, check=True)


def test_outside_of_a_span_there_is_no_trace() -> None:
    assert current_trace() is None


def test_a_span_is_taken_with_its_flags_and_state() -> None:
    with trace.use_span(trace.NonRecordingSpan(CONTEXT)):
        taken = current_trace()
    assert taken is not None
    assert taken.traceparent == f"00-{0xAB:032x}-{0xCD:016x}-01"
    assert taken.tracestate == "vendor=1"


def test_a_module_that_is_still_being_imported_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", object())  # type: ignore[arg-type]
    assert current_trace() is None
