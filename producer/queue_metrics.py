"""Metrics of queues, as gateways and tasks tell them; needs prometheus_client, so not the SDK's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from inferq.producer.admin import QueueAdmin
from inferq.protocol.keys import Lane
from inferq.protocol.replies import QueueOverview
from inferq.runtime.metrics import Families


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """What one queue holds, all its partitions together, and how many workers live."""

    overview: QueueOverview
    num_workers: int


async def read_queue(admin: QueueAdmin) -> QueueFigures:
    """Read the figures of a queue; raise `InferqError` if its server does not answer."""
    overview = await admin.overview()
    workers = await admin.workers()
    return QueueFigures(overview, sum(worker.is_alive for worker in workers))


def queue_metrics(queues: Sequence[str], read: Mapping[str, QueueFigures]) -> Iterator[Metric]:
    """Return the metrics of `queues`; of one that was not read, only that."""
    make = Families()
    yield make.gauges(
        "inferq_queue_up",
        "Whether the queue's figures could be read",
        ("queue",),
        {(queue,): queue in read for queue in queues},
    )
    yield from _by_lane(read)
    yield make.gauges(
        "inferq_queue_jobs",
        "Jobs that have not ended",
        ("queue", "state"),
        {
            (queue, state): getattr(figures.overview.load, state)
            for queue, figures in read.items()
            for state in ("queued", "running", "delayed")
        },
    )
    yield make.gauges(
        "inferq_queue_outstanding_tokens",
        "Tokens of jobs that have not ended, of prompts and of outputs at most",
        ("queue", "kind"),
        {
            (queue, kind): getattr(figures.overview.load, f"{kind}_tokens")
            for queue, figures in read.items()
            for kind in ("prompt", "budget")
        },
    )
    for name, text in (
        ("left_behind", "Jobs that lost their worker and wait for another"),
        ("dead_letters", "Dead letters"),
    ):
        values = {(queue,): getattr(figures.overview, name) for queue, figures in read.items()}
        yield make.gauges(f"inferq_queue_{name}", text, ("queue",), values)
    yield make.counters(
        "inferq_queue_jobs_ended",
        "Jobs that ever ended",
        ("queue",),
        {(queue,): figures.overview.finished_total for queue, figures in read.items()},
    )
    yield make.gauges(
        "inferq_queue_workers",
        "Workers that have reported lately",
        ("queue",),
        {(queue,): figures.num_workers for queue, figures in read.items()},
    )


def _by_lane(read: Mapping[str, QueueFigures]) -> Iterator[Metric]:
    lanes = {
        (queue, lane.value): figures.overview.lanes[lane]
        for queue, figures in read.items()
        for lane in Lane
    }
    make, labels = Families(), ("queue", "lane")
    yield make.gauges(
        "inferq_queue_depth",
        "Entries that no worker has taken",
        labels,
        {place: lane.waiting for place, lane in lanes.items()},
    )
    yield make.gauges(
        "inferq_queue_taken",
        "Entries delivered to a worker and not ended",
        labels,
        {place: lane.taken for place, lane in lanes.items()},
    )
    yield make.gauges(
        "inferq_queue_oldest_age_seconds",
        "How long the first of the waiting entries has waited",
        labels,
        {place: (lane.oldest_ms or 0) / 1000 for place, lane in lanes.items()},
    )
