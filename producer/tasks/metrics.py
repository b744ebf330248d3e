"""The metrics of a tasks process and of those that it started; see docs/metrics.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from inferq.producer.admin import QueueAdmin
from inferq.producer.partitions import Partitions
from inferq.producer.queue_metrics import QueueFigures, queue_metrics, read_queue
from inferq.producer.tasks.counts import Counted
from inferq.producer.tasks.deliveries import DeliveryStore
from inferq.producer.tasks.settings import TasksSettings
from inferq.producer.tasks.workers import WorkerProcesses
from inferq.protocol.keys import QueueKeys, TaskKeys
from inferq.protocol.upkeep import UpkeepScripts
from inferq.runtime.figures import TIMEOUT_S, Figures
from inferq.runtime.metrics import Families, MetricsPage
from inferq.version import __version__


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """A queue's figures, its deliveries, and ends that nobody moved out of the outbox."""

    queue: QueueFigures
    due: int
    dead: int
    unmoved: int


class TasksMetrics:
    """Tells what the worker processes did, and what Redis says of the queues when asked."""

    def __init__(self, settings: TasksSettings, processes: WorkerProcesses) -> None:
        self._processes = processes
        url = settings.redis_url.get_secret_value()
        self._queues = {
            queue: _QueueReader(
                QueueAdmin(url, queue, partitions=settings.partitions, timeout_s=TIMEOUT_S),
                Partitions(url, queue, settings.partitions, timeout_s=TIMEOUT_S),
            )
            for queue in settings.queues
        }
        self._figures: Figures[TaskFigures] = Figures(
            settings.queues, lambda queue: self._queues[queue].read()
        )
        self.page = MetricsPage(__version__, self.collect, refresh=self._figures.refresh)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of this moment."""
        yield from _done(self._processes)
        read = self._figures.current
        make = Families()
        for name, text, field in (
            ("inferq_webhooks_due", "Deliveries that are due", "due"),
            ("inferq_webhooks_dead", "Deliveries given up and kept", "dead"),
            ("inferq_webhooks_unmoved", "Ends of jobs that wait in the outbox", "unmoved"),
        ):
            values = {(queue,): getattr(figures, field) for queue, figures in read.items()}
            yield make.gauges(name, text, ("queue",), values)
        yield from queue_metrics(
            self._figures.names, {queue: figures.queue for queue, figures in read.items()}
        )

    async def aclose(self) -> None:
        """Close the connections."""
        for queue in self._queues.values():
            await queue.aclose()


class _QueueReader:
    def __init__(self, admin: QueueAdmin, partitions: Partitions) -> None:
        self._admin = admin
        self._partitions = partitions
        server = partitions.server_of(TaskKeys.PREFIX)
        self._deliveries = DeliveryStore(server, partitions.queue)

    async def read(self) -> TaskFigures:
        """Raises `InferqError` if the server does not answer."""
        unmoved = 0
        for partition in range(self._partitions.number):
            server = self._partitions.server(partition)
            scripts = UpkeepScripts(server.commands, QueueKeys(self._partitions.queue, partition))
            unmoved += await server.call(scripts.outbox_length)
        return TaskFigures(
            await read_queue(self._admin),
            due=await self._deliveries.count_due(),
            dead=await self._deliveries.count_dead(),
            unmoved=unmoved,
        )

    async def aclose(self) -> None:
        await self._admin.aclose()
        await self._partitions.aclose()


def _done(processes: WorkerProcesses) -> Iterator[Metric]:
    make = Families()
    for counted, name, text, labels in (
        (Counted.ATTEMPT, "inferq_webhook_attempts", "Deliveries that were due", ("outcome",)),
        (Counted.RUN, "inferq_task_runs", "Tasks performed", ("task", "outcome")),
        (Counted.LINE, "inferq_batch_lines", "Lines of batches that ended", ("outcome",)),
    ):
        totals: Counter[tuple[str, ...]] = Counter()
        for counts in processes.counts:
            totals.update(counts.read(counted))
        yield make.counters(name, text, labels, totals)
    yield make.gauge(
        "inferq_tasks_workers", "Processes that perform tasks and are alive", processes.num_alive
    )
    yield make.counter(
        "inferq_tasks_worker_restarts",
        "Processes that ended and were started again",
        processes.num_restarts,
    )
