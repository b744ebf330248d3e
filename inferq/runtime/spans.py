"""Spans of OpenTelemetry's SDK, made and exported without harm to what they are about.

Needs the extra `tracing`; imported by `tracing.start_tracing` when a process makes traces.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Self

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.trace_context import TraceContext
from inferq.runtime.tracing import Kind
from inferq.version import __version__

logger = structlog.get_logger("inferq.tracing")

#: Seconds that the last spans get when a process ends; a collector that is slower loses them.
END_S: Final = 2.0
#: What tells of every batch that fails; `_Exporter` tells when that begins and ends.
_LOUD_LOGGERS: Final = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk.trace.export",
)

#: What would tell of each span that finds the queue full; `_Exporter` tells of the first.
_QUEUE_LOGGER: Final = "opentelemetry.sdk._shared_internal"

Attribute = str | bool | int | float | Sequence[str]


class Span:
    """One span; what is not recorded, as it is not sampled, costs next to nothing."""

    __slots__ = ("_span", "_tracing")

    def __init__(self, span: trace.Span, tracing: Tracing) -> None:
        self._span = span
        self._tracing = tracing

    @property
    def is_recording(self) -> bool:
        """Whether it will be exported."""
        return self._span.is_recording()

    @property
    def context(self) -> TraceContext:
        """What others go on from."""
        own = self._span.get_span_context()
        context = TraceContext.of_ids(
            own.trace_id,
            own.span_id,
            is_sampled=own.trace_flags.sampled,
            tracestate=own.trace_state.to_header(),
        )
        assert context is not None, "spans have ids"
        return context

    def rename(self, name: str) -> None:
        """Change the name: what it is about may be known late."""
        self._span.update_name(name)

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def event(
        self, name: str, attributes: Mapping[str, Attribute] | None = None, at_ns: int | None = None
    ) -> None:
        """Record that something happened, now or at nanoseconds since 1970."""
        self._span.add_event(name, attributes, at_ns)

    def fail(self, kind: str) -> None:
        """Mark it as failed, by a code; never by a message, which may hold what was asked."""
        self._span.set_status(trace.StatusCode.ERROR, kind)
        self._span.set_attribute("error.type", kind)

    def child(
        self,
        name: str,
        kind: Kind = Kind.INTERNAL,
        *,
        start_ns: int | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> Span:
        """Begin a part of this one."""
        return self._tracing.span(
            name, kind, parent=self.context, start_ns=start_ns, attributes=attributes
        )

    def end(self, at_ns: int | None = None) -> None:
        """End it, now or at nanoseconds since 1970."""
        self._span.end(at_ns)

    def as_current(self) -> AbstractContextManager[Any]:
        """Make it OpenTelemetry's current span, also for the SDK's submissions, while entered."""
        return trace.use_span(
            self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        )


class Tracing:
    """Makes the spans of one process; `close` sends the last ones."""

    def __init__(self, provider: TracerProvider, ids: _Ids) -> None:
        self._provider = provider
        self._ids = ids
        self._tracer = provider.get_tracer("inferq", __version__)

    @classmethod
    def start(cls, service: str, url: str | None, *, instance: str | None = None) -> Self:
        """Begin to export as a service, to `url` or where OpenTelemetry's variables say.

        Their values for the sampler, the resource and the exporter are respected. Raises
        `InvalidRequestError` for some that cannot be used.
        """
        given = {"service.name": service, "service.version": __version__}
        if instance is not None:
            given["service.instance.id"] = instance
        ids = _Ids()
        provider = TracerProvider(
            resource=Resource.create({**given, **OTELResourceDetector().detect().attributes}),
            id_generator=ids,
            shutdown_on_exit=False,  # it would wait for the collector, however slow
        )
        try:
            exporter = _Exporter(OTLPSpanExporter(endpoint=url))
            provider.add_span_processor(BatchSpanProcessor(exporter))
        except ValueError as error:
            raise InvalidRequestError(str(error), field="OTEL_*") from None
        for name in _LOUD_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        return cls(provider, ids)

    def span(
        self,
        name: str,
        kind: Kind = Kind.INTERNAL,
        *,
        parent: TraceContext | None = None,
        trace_id: str | None = None,
        start_ns: int | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> Span:
        """Begin a span, of `parent`'s trace or a new one, which may have the id `trace_id`."""
        context = trace.set_span_in_context(_remote(parent))
        self._ids.next_trace = None if parent or trace_id is None else int(trace_id, 16)
        span = self._tracer.start_span(
            name,
            context,
            trace.SpanKind[kind.name],
            attributes,
            start_time=start_ns,
            record_exception=False,
            set_status_on_exception=False,
        )
        return Span(span, self)

    def close(self) -> None:
        """Send what is left, for as long as `END_S` at most."""
        ending = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        ending.start()
        ending.join(END_S)


class _Ids(RandomIdGenerator):
    """Random ids; the next trace may be given one."""

    def __init__(self) -> None:
        self.next_trace: int | None = None

    def generate_trace_id(self) -> int:
        given, self.next_trace = self.next_trace, None
        return super().generate_trace_id() if given is None else given


class _Exporter(SpanExporter):
    """Exports by another one, and says once when spans begin to be lost, and when no more are."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._num_lost = 0
        # Before the logger's own filter, which lets one of many through.
        logging.getLogger(_QUEUE_LOGGER).filters.insert(0, self._take_warning)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        why = "the collector refuses or is away"
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - whatever is wrong, spans are what is lost
            result, why = SpanExportResult.FAILURE, type(error).__name__
        if result is not SpanExportResult.SUCCESS:
            self._lose(len(spans), why)
        elif self._num_lost:
            logger.info("traces are exported again", spans_lost=self._num_lost)
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        logging.getLogger(_QUEUE_LOGGER).removeFilter(self._take_warning)
        self._exporter.shutdown()

    def _lose(self, count: int, why: str) -> None:
        if not self._num_lost:
            logger.warning("traces are not exported", why=why)
        self._num_lost += count

    def _take_warning(self, record: logging.LogRecord) -> bool:
        """Tell of a full queue in our words; a filter of the logger that would repeat it."""
        if record.levelno >= logging.WARNING:
            self._lose(1, "the collector is slower than spans are made")
        return False


def _remote(context: TraceContext | None) -> trace.Span:
    if context is None:
        return trace.INVALID_SPAN
    state = None if context.tracestate is None else [context.tracestate]
    return trace.NonRecordingSpan(
        trace.SpanContext(
            int(context.trace_id, 16),
            int(context.span_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(int(context.is_sampled)),
            trace_state=None if state is None else trace.TraceState.from_header(state),
        )
    )
