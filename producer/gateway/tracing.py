"""The spans of the gateway: one for each request, and one for putting its jobs into the queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import structlog
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferq.producer.gateway.methods import METHODS
from inferq.producer.gateway.middleware import is_quiet
from inferq.protocol.trace_context import TraceContext
from inferq.runtime.tracing import Kind

if TYPE_CHECKING:
    from inferq.runtime.spans import Span, Tracing

#: Where routes find the span of their request, if there is one.
_STATE: Final = "span"


class TraceLayer:
    """Makes the span of each request that is not quiet, from its head to the last byte sent.

    It goes on from the caller's `traceparent`, and is OpenTelemetry's current span meanwhile, so
    that the jobs that are submitted are in its trace. Log lines have the trace's id.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; see the ASGI specification."""
        if scope["type"] != "http" or is_quiet(scope["path"]):
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        span = self._tracing.span(
            method,
            Kind.SERVER,
            parent=_caller(Headers(scope=scope)),
            attributes={
                "http.request.method": method,
                "url.scheme": scope["scheme"],
                "url.path": scope["path"][:256],
            },
        )
        scope.setdefault("state", {})[_STATE] = span
        with (
            span.as_current(),
            structlog.contextvars.bound_contextvars(trace_id=span.context.trace_id),
        ):
            try:
                await self._app(scope, receive, _watched(send, span))
            finally:
                route = getattr(scope.get("route"), "path", None)
                if route is not None:
                    span.rename(f"{method} {route}")
                    span.set({"http.route": route})
                span.end()


@contextmanager
def submission(request: Request, queue: str, number: int) -> Iterator[None]:
    """Make the span of putting `number` jobs of a request into a queue: they are its children."""
    of_request: Span | None = getattr(request.state, _STATE, None)
    if of_request is None:
        yield
        return
    span = of_request.child(
        f"send {queue}",
        Kind.PRODUCER,
        attributes={
            "messaging.system": "inferq",
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": queue,
            "messaging.batch.message_count": number,
        },
    )
    try:
        with span.as_current():
            yield
    except Exception as error:
        span.fail(type(error).__name__)
        raise
    finally:
        span.end()


def name_jobs(request: Request, ids: Sequence[str]) -> None:
    """Have the request's span, and its log lines from now on, name the jobs that it is about."""
    span: Span | None = getattr(request.state, _STATE, None)
    if span is not None:
        span.set({"inferq.job_ids": list(ids)})
    structlog.contextvars.bind_contextvars(job_id=",".join(ids))


def _caller(headers: Headers) -> TraceContext | None:
    state = ",".join(headers.getlist("tracestate"))
    return TraceContext.read(headers.get("traceparent"), state or None)


def _watched(send: Send, span: Span) -> Send:
    """Have the span know the status, and when the first byte of the answer was sent."""
    has_begun = False

    async def send_watched(message: Message) -> None:
        nonlocal has_begun
        await send(message)
        if message["type"] == "http.response.start":
            span.set({"http.response.status_code": message["status"]})
            if message["status"] >= 500:
                span.fail(str(message["status"]))
        elif not has_begun and message.get("body"):
            has_begun = True
            span.event("first byte")

    return send_watched
