"""What a process answers at `/metrics`: books turned into Prometheus' text when somebody asks."""

from __future__ import annotations

import math
import platform
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from inferq.runtime.histogram import Histogram

#: The values of the labels of one sample; the labels' names are told once.
Place = TypeVar("Place", bound=tuple[str, ...])


class Families:
    """Makes metrics that all have the same `constant` labels, besides those of their own."""

    def __init__(self, constant: Mapping[str, str] | None = None) -> None:
        self._names = tuple(constant or ())
        self._values = tuple((constant or {}).values())

    def gauge(self, name: str, text: str, value: float) -> Metric:
        """Return a gauge without labels of its own."""
        return self.gauges(name, text, (), {(): value})

    def gauges(
        self, name: str, text: str, labels: Sequence[str], samples: Mapping[Place, float]
    ) -> Metric:
        """Return a gauge with a value for each set of labels."""
        family = GaugeMetricFamily(name, text, labels=(*self._names, *labels))
        return self._filled(family, samples)

    def counter(self, name: str, text: str, value: float) -> Metric:
        """Return a counter without labels of its own; `name` is what `_total` is put behind."""
        return self.counters(name, text, (), {(): value})

    def counters(
        self, name: str, text: str, labels: Sequence[str], samples: Mapping[Place, float]
    ) -> Metric:
        """Return a counter with a value for each set of labels."""
        family = CounterMetricFamily(name, text, labels=(*self._names, *labels))
        return self._filled(family, samples)

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        """Return a histogram without labels of its own."""
        return self.histograms(name, text, (), {(): histogram})

    def histograms(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        histograms: Mapping[Place, Histogram],
    ) -> Metric:
        """Return a histogram for each set of labels."""
        family = HistogramMetricFamily(name, text, labels=(*self._names, *labels))
        for values, histogram in histograms.items():
            buckets = [(_bound(le), count) for le, count in histogram.cumulative()]
            family.add_metric((*self._values, *values), buckets, histogram.total)
        return family

    def _filled(
        self, family: CounterMetricFamily | GaugeMetricFamily, samples: Mapping[Place, float]
    ) -> Metric:
        for values, value in samples.items():
            family.add_metric((*self._values, *values), value)
        return family


def _bound(value: float) -> str:
    return "+Inf" if math.isinf(value) else str(float(value))


class Books(Collector):
    """Lets a registry ask `collect`, which must be cheap, whenever its text is made."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of this moment."""
        yield from self._collect()


class MetricsPage:
    """The text of one process's metrics: its own `collects`, its build, and its resources.

    `refresh` is awaited first, to bring up to date what the process itself does not know.
    """

    def __init__(
        self,
        version: str,
        *collects: Callable[[], Iterable[Metric]],
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._build = (version, platform.python_version())
        self._refresh = refresh
        for collect in (self._tell_build, *collects):
            self._registry.register(Books(collect))

    async def answer(self, accept: str) -> tuple[str, bytes]:
        """Return the content type that `accept` asks for, of those there are, and the text."""
        if self._refresh is not None:
            await self._refresh()
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)

    def _tell_build(self) -> Iterator[Metric]:
        yield Families().gauges(
            "inferq_build_info",
            "Always 1; the labels tell what runs",
            ("version", "python"),
            {self._build: 1},
        )
