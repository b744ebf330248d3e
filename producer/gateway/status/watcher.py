"""Looks at every queue again and again, and at workers' blocks while somebody asks for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from inferq.producer.admin import QueueAdmin
from inferq.producer.gateway.status.history import SAMPLE_S, History
from inferq.producer.workers import WorkerInfo
from inferq.protocol.errors import DecodeError, InferqError
from inferq.protocol.replies import QueueOverview
from inferq.protocol.snapshots import BlockSnapshot

logger = structlog.get_logger("inferq.gateway")

#: Seconds for which a mark on a queue is not renewed; it stands for ten.
MARK_AGAIN_S: Final = 3.0


@dataclass(slots=True)
class _Watched:
    """What was last seen of one queue."""

    admin: QueueAdmin
    history: History = field(default_factory=History)
    overview: QueueOverview | None = None
    is_lost: bool = False
    marked_s: float | None = None


class StatusWatcher:
    """The last ten minutes of all queues, kept by one task (`run`).

    `admins` are the queues, and `workers` returns a queue's workers as they were last seen.
    """

    def __init__(
        self,
        admins: Mapping[str, QueueAdmin],
        workers: Callable[[str], Sequence[WorkerInfo]],
    ) -> None:
        self._workers = workers
        self._queues = {queue: _Watched(admin) for queue, admin in admins.items()}

    def history(self, queue: str) -> History:
        """Return the queue's last ten minutes."""
        return self._queues[queue].history

    def overview(self, queue: str) -> QueueOverview | None:
        """Return what the queue held some seconds ago; None while its server is out of reach."""
        watched = self._queues[queue]
        return None if watched.is_lost else watched.overview

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(SAMPLE_S)

    async def look(self) -> None:
        """Take one sample of each queue."""
        await asyncio.gather(*(self._look_at(queue) for queue in self._queues))

    async def mark(self, queue: str) -> None:
        """Have the queue's workers report often and tell what their blocks hold, for a while."""
        watched, now = self._queues[queue], time.monotonic()
        if watched.marked_s is None or now > watched.marked_s + MARK_AGAIN_S:
            watched.marked_s = now
            await watched.admin.watch()

    async def block_snapshot(self, queue: str, partition: int, worker: str) -> BlockSnapshot | None:
        """Return what a worker's blocks held a moment ago; None where that is not known."""
        await self.mark(queue)
        try:
            return await self._queues[queue].admin.block_snapshot(worker, partition)
        except DecodeError as error:
            logger.warning("block snapshot not read", worker=worker, error=str(error))
            return None

    async def _look_at(self, queue: str) -> None:
        watched = self._queues[queue]
        try:
            overview = await watched.admin.overview()
        except InferqError:
            watched.is_lost = True  # the directory, which looks more often, says so in the log
            return
        watched.is_lost, watched.overview = False, overview
        prompt_rate, generated_rate = token_rates(self._workers(queue))
        watched.history.add(overview, prompt_rate=prompt_rate, generated_rate=generated_rate)


def token_rates(workers: Sequence[WorkerInfo]) -> tuple[float, float]:
    """Return prompt and generated tokens per second of the workers that report, together."""
    reporting = [worker for worker in workers if worker.is_reporting]
    return (
        sum(worker.prompt_rate for worker in reporting),
        sum(worker.generated_rate for worker in reporting),
    )
