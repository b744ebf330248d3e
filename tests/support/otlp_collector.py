"""A collector of traces by OTLP over HTTP, to which real exporters send."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

#: Seconds to wait for spans on a loaded machine.
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it came, its times in nanoseconds."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


class Collector:
    """Takes spans on a free port while it is entered; answers with `status` after `delay_s`."""

    def __init__(self) -> None:
        self.status = 200
        self.delay_s = 0.0
        self.spans: list[CollectedSpan] = []
        self.num_requests = 0
        self._arrived = threading.Condition()
        self._ending = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._server.shutdown()
        self._server.server_close()

    def wait_for(self, is_there: Callable[[list[CollectedSpan]], bool]) -> list[CollectedSpan]:
        """Return all spans once they are as wanted."""
        deadline = time.monotonic() + TIMEOUT_S
        with self._arrived:
            while not is_there(self.spans):
                left = deadline - time.monotonic()
                assert left > 0, f"not as wanted: {self.spans}"
                self._arrived.wait(left)
            return list(self.spans)

    def wait_for_request(self) -> None:
        """Return when something was sent, whatever the answer."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.num_requests > 0, TIMEOUT_S)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with collector._arrived:
                    collector.num_requests += 1
                    collector._arrived.notify_all()
                collector._ending.wait(collector.delay_s)
                if collector.status == 200:
                    collector._take(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(collector.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # a process that has ended meanwhile
                    self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._arrived:
            for resource in request.resource_spans:
                service = _plain(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_collected(service, span) for span in scope.spans]
            self._arrived.notify_all()


def restore_loggers() -> None:
    """Undo what making traces did to OpenTelemetry's loggers."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("opentelemetry") and isinstance(logger, logging.Logger):
            logger.setLevel(logging.NOTSET)


def _collected(service: str, span: Any) -> CollectedSpan:
    return CollectedSpan(
        service,
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code,
        _plain(span.attributes),
        [(event.name, _plain(event.attributes)) for event in span.events],
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(part) for part in value.array_value.values]
    return getattr(value, kind)
