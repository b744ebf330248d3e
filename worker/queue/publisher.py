"""Sends what the jobs generated since the last flush: many jobs in one call, off the engine's path.

Tokens that arrive while a call is under way wait for the next one, and travel in one event:
coalescing comes from backlog, not from a timer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from inferq.protocol.errors import QueueFull, ServerLost
from inferq.protocol.replies import PublishItem, PublishReply, PublishStatus
from inferq.protocol.scripts import QueueScripts
from inferq.worker.queue.books import PublishBooks
from inferq.worker.queue.outage import Outage
from inferq.worker.queue.running import NOT_OURS, RunningJob, RunningJobs

logger = structlog.get_logger("inferq.publisher")

#: Most jobs of one call: bounds the time that the script holds the server.
MAX_JOBS_PER_CALL: Final = 256
#: Bytes of events at which a call is long enough: one whose reply does not come in time is sent
#: again, with more. With a last event of the longest it stays below 9 MiB, as a claim does.
MAX_BYTES_PER_CALL: Final = 2**20
#: Bounds of the pause after a failed call, in seconds.
RETRY_PAUSE_S: Final = (0.05, 1.0)


class Publisher:
    """Publishes the registry's jobs; tells the service of ends, losses and cancels.

    `on_published(job)` runs when the terminal event is on the server, `on_lost(job, why)` when
    another worker owns the job or its lease ended, `on_cancel(job)` when a cancel mark was seen.
    """

    def __init__(
        self,
        scripts: QueueScripts,
        worker: str,
        jobs: RunningJobs,
        *,
        lease_s: float,
        retention_s: float,
        on_published: Callable[[RunningJob], None],
        on_lost: Callable[[RunningJob, str], None],
        on_cancel: Callable[[RunningJob], None],
        books: PublishBooks | None = None,
    ) -> None:
        self._scripts = scripts
        self._worker = worker
        self._jobs = jobs
        self._lease_s = lease_s
        self._retention_ms = round(retention_s * 1000)
        self._on_published = on_published
        self._on_lost = on_lost
        self._on_cancel = on_cancel
        self._books = books or PublishBooks()
        self._outage = Outage(logger, "publish")
        self._dirty: dict[RunningJob, None] = {}
        self._wake = asyncio.Event()
        self._progressed = asyncio.Event()

    def mark_dirty(self, job: RunningJob) -> None:
        """Have the job's unsent tokens (or its end) published soon."""
        self._dirty[job] = None
        if job.unsent_since is None:
            job.unsent_since = time.monotonic()
        self._wake.set()

    def forget(self, job: RunningJob) -> None:
        """Publish nothing more of the job."""
        self._dirty.pop(job, None)
        self._progressed.set()

    async def flushed(self, jobs: Iterable[RunningJob] | None = None) -> None:
        """Wait until the server has all tokens of `jobs` (default: of those with unsent ones).

        Waits for these jobs only: the others' tokens never stop coming.
        """
        awaited = tuple(self._dirty if jobs is None else jobs)
        while any(job in self._dirty for job in awaited):
            self._progressed.clear()
            await self._progressed.wait()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            pause = RETRY_PAUSE_S[0]
            while self._dirty:
                try:
                    await self._flush_once()
                    self._outage.succeeded()
                    self._progressed.set()
                    pause = RETRY_PAUSE_S[0]
                except (ServerLost, QueueFull) as error:
                    self._outage.failed(error)
                    self._drop_expired()
                    self._progressed.set()
                    await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                    pause = min(2 * pause, RETRY_PAUSE_S[1])

    async def _flush_once(self) -> None:
        batch, items = self._next_batch()
        if not batch:
            self._dirty.clear()
            return
        for job in batch:  # to the end of the line: those beyond this call come first in the next
            self._dirty[job] = self._dirty.pop(job)
        sent_at = time.monotonic()
        since = [_taken_since(job, item, sent_at) for job, item in zip(batch, items, strict=True)]
        try:
            replies = await self._scripts.publish(
                self._worker,
                items,
                lease_ms=round(self._lease_s * 1000),
                retention_ms=self._retention_ms,
            )
        except (ServerLost, QueueFull):
            self._books.calls["failed"] += 1
            for job, earlier in zip(batch, since, strict=True):
                job.unsent_since = earlier
            raise
        self._books.calls["ok"] += 1
        self._count(batch, items, replies, since)
        self._settle(batch, items, replies, sent_at)

    def _next_batch(self) -> tuple[list[RunningJob], list[PublishItem]]:
        """Return the jobs of the next call, and what is to be published of each."""
        batch: list[RunningJob] = []
        items: list[PublishItem] = []
        bytes_left = MAX_BYTES_PER_CALL
        for job in self._dirty:
            if job not in self._jobs or not job.is_dirty:
                continue
            item = job.unsent(bytes_left)
            batch.append(job)
            items.append(item)
            bytes_left -= sum(len(data) for _, data in item.events)
            if len(batch) >= MAX_JOBS_PER_CALL or bytes_left <= 0:
                break
        return batch, items

    def _count(
        self,
        batch: Sequence[RunningJob],
        items: Sequence[PublishItem],
        replies: Sequence[PublishReply],
        since: Sequence[float],
    ) -> None:
        now = time.monotonic()
        for job, item, reply, earlier in zip(batch, items, replies, since, strict=True):
            if reply.status is PublishStatus.OK:
                self._books.published(item.first, item.events)
                self._books.delay_s.observe(now - earlier)
            elif reply.status is PublishStatus.STALE:
                self._books.fenced["publish"] += 1
            else:
                job.unsent_since = earlier

    def _settle(
        self,
        batch: Sequence[RunningJob],
        items: Sequence[PublishItem],
        replies: Sequence[PublishReply],
        sent_at: float,
    ) -> None:
        for job, item, reply in zip(batch, items, replies, strict=True):
            if job not in self._jobs:
                continue  # let go while the call was under way
            if reply.status is PublishStatus.STALE or reply.offset > max(
                job.log.total, job.inherited
            ):
                self._dirty.pop(job, None)
                self._on_lost(job, NOT_OURS)
                continue
            job.lease_until = sent_at + self._lease_s
            job.acknowledged = reply.offset
            if item.terminal is not None and reply.status is PublishStatus.OK:
                self._dirty.pop(job, None)
                self._on_published(job)
            elif reply.cancel and not job.is_finished:
                self._on_cancel(job)
            elif not job.is_dirty:
                self._dirty.pop(job, None)

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for job in list(self._dirty):
            if job not in self._jobs:
                self._dirty.pop(job, None)
            elif now >= job.lease_until:
                self._dirty.pop(job, None)
                self._on_lost(job, "the lease ended while the server could not be reached")


def _taken_since(job: RunningJob, item: PublishItem, now: float) -> float:
    """Return since when the job has had something unsent, of which a call at `now` takes `item`."""
    since = now if job.unsent_since is None else job.unsent_since
    job.unsent_since = since if job.has_more_than(item) else None
    return since
