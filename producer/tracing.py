"""The trace that a program is in, as OpenTelemetry knows it; without importing that."""

from __future__ import annotations

import sys

from inferq.protocol.trace_context import TraceContext


def current_trace() -> TraceContext | None:
    """Return the context of OpenTelemetry's current span; None where there is none, or no API.

    Only a program that has imported the API can have made a span.
    """
    api = sys.modules.get("opentelemetry.trace")
    current_span = getattr(api, "get_current_span", None)
    if current_span is None:
        return None
    context = current_span().get_span_context()
    return TraceContext.of_ids(
        context.trace_id,
        context.span_id,
        is_sampled=bool(context.trace_flags.sampled),
        tracestate=context.trace_state.to_header(),
    )
