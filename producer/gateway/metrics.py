"""A gateway's metrics: what its requests came to, and its queues' figures; see docs/metrics.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import Metric

from inferq.producer.admin import QueueAdmin
from inferq.producer.gateway.admission.limits import RateLimited
from inferq.producer.gateway.errors import HttpError
from inferq.producer.gateway.in_flight import InFlight
from inferq.producer.gateway.requests.body import BodyMemory
from inferq.producer.queue_metrics import QueueFigures, queue_metrics, read_queue
from inferq.runtime.figures import Figures
from inferq.runtime.histogram import Histogram
from inferq.runtime.metrics import Families, MetricsPage
from inferq.version import __version__

#: Bounds of the time to the first byte, in seconds.
FIRST_BYTE_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0),
)
#: Why a request is turned away: a limit of its key, or one of these codes of errors.
_LIMITS: Final = ("requests", "tokens", "concurrency")
_FULL: Final = ("queue_full", "overloaded")


@dataclass(slots=True)
class HttpBooks:
    """Requests by route, method and status; what is under way; bytes; who was turned away."""

    requests: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    first_byte_s: dict[tuple[str], Histogram] = field(default_factory=dict)
    rate_limited: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    streams_open: int = 0
    request_bytes: int = 0
    response_bytes: int = 0

    def began_body(self, route: str, after_s: float) -> None:
        """Count the time to the first byte of an answer's body."""
        place = (route,)
        if place not in self.first_byte_s:
            self.first_byte_s[place] = Histogram(FIRST_BYTE_S)
        self.first_byte_s[place].observe(after_s)

    def refused(self, error: HttpError) -> None:
        """Count a request that was turned away, if the error says so."""
        if isinstance(error, RateLimited):
            self.rate_limited[error.limit] += 1
        elif error.code in _FULL:
            self.rate_limited[error.code] += 1


class GatewayMetrics:
    """Tells the books of one gateway, and what Redis says of its queues when somebody asks."""

    def __init__(
        self, admins: Mapping[str, QueueAdmin], in_flight: InFlight, bodies: BodyMemory
    ) -> None:
        self.books = HttpBooks()
        self._in_flight = in_flight
        self._bodies = bodies
        self._queues: Figures[QueueFigures] = Figures(
            admins, lambda queue: read_queue(admins[queue])
        )
        self.page = MetricsPage(__version__, self.collect, refresh=self._queues.refresh)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of this moment."""
        yield from _requests(self.books)
        yield from _bodies(self.books, self._bodies)
        make = Families()
        yield make.gauge(
            "inferq_gateway_generations_in_flight",
            "Requests that wait for tokens, streams included",
            len(self._in_flight),
        )
        yield from queue_metrics(self._queues.names, self._queues.current)


def _requests(books: HttpBooks) -> Iterator[Metric]:
    make = Families()
    yield make.counters(
        "inferq_gateway_requests",
        "Requests answered",
        ("route", "method", "status"),
        books.requests,
    )
    yield make.gauge(
        "inferq_gateway_requests_in_flight", "Requests that are being answered", books.in_flight
    )
    yield make.gauge(
        "inferq_gateway_streams_open", "Streams of events that are open", books.streams_open
    )
    yield make.histograms(
        "inferq_gateway_time_to_first_byte_seconds",
        "From a request's head to the first byte of the answer's body",
        ("route",),
        books.first_byte_s,
    )
    yield make.counters(
        "inferq_gateway_rate_limited",
        "Requests turned away",
        ("reason",),
        {(reason,): books.rate_limited[reason] for reason in (*_LIMITS, *_FULL)},
    )


def _bodies(books: HttpBooks, memory: BodyMemory) -> Iterator[Metric]:
    make = Families()
    yield make.counter(
        "inferq_gateway_request_body_bytes", "Bytes of request bodies", books.request_bytes
    )
    yield make.counter(
        "inferq_gateway_response_body_bytes", "Bytes of answers", books.response_bytes
    )
    yield make.gauge(
        "inferq_gateway_bodies_held_bytes", "Bytes of request bodies in memory", memory.held
    )
