"""Keeps leases alive while the engine makes progress, and ends jobs whose time has come.

A lease is renewed by publishing tokens, or by a heartbeat when none came for the job (long prefill,
waiting). A live thread is no proof of progress: once a step takes longer than it may, heartbeats
stop and other workers take the jobs over. All times are this machine's monotonic clock, and a lease
is counted from before the call that renewed it, so it never outlasts the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

import structlog

from inferq.protocol.errors import QueueFull, ServerLost
from inferq.protocol.replies import PublishStatus
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.task_ends import end_tasks
from inferq.worker.queue.books import PublishBooks
from inferq.worker.queue.outage import Outage
from inferq.worker.queue.running import NOT_OURS, RunningJob, RunningJobs

logger = structlog.get_logger("inferq.lease")

#: Heartbeats per lease: two may be lost before a lease ends.
BEATS_PER_LEASE: Final = 4


class LeaseKeeper:
    """Renews the leases of the registry's jobs, and reports those lost, cancelled or overdue.

    `is_stuck()` tells whether the engine's step takes longer than a step may.
    """

    def __init__(
        self,
        scripts: QueueScripts,
        worker: str,
        jobs: RunningJobs,
        *,
        lease_s: float,
        retention_s: float,
        is_stuck: Callable[[], bool],
        on_lost: Callable[[RunningJob, str], None],
        on_cancel: Callable[[RunningJob], None],
        on_deadline: Callable[[RunningJob], None],
        books: PublishBooks | None = None,
    ) -> None:
        self._scripts = scripts
        self._worker = worker
        self._jobs = jobs
        self._lease_s = lease_s
        self._retention_ms = round(retention_s * 1000)
        self._is_stuck = is_stuck
        self._on_lost = on_lost
        self._on_cancel = on_cancel
        self._on_deadline = on_deadline
        self._books = books or PublishBooks()
        self._outage = Outage(logger, "heartbeat")

    async def run(self) -> None:
        """Beat until cancelled."""
        # A beat may wait for the server; ends do not wait for a beat.
        parts = [asyncio.create_task(self._beat_on()), asyncio.create_task(self._end_in_time())]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            await end_tasks(parts)

    async def _beat_on(self) -> None:
        interval = self._lease_s / BEATS_PER_LEASE
        while True:
            await asyncio.sleep(interval)
            try:
                await self._beat(interval)
            except (ServerLost, QueueFull) as error:
                self._outage.failed(error)

    async def _end_in_time(self) -> None:
        while True:
            self._jobs.added.clear()
            # A job that is taken in meanwhile may end before those there are.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._next_end()):
                    await self._jobs.added.wait()
            self._end_overdue()
            self._drop_expired()

    def _next_end(self) -> float:
        """Return the seconds to the next end of a lease or deadline, a beat's interval at most."""
        now = time.monotonic()
        ends = [job.lease_until for job in self._jobs]
        ends += [job.deadline for job in self._jobs if job.deadline and not job.is_finished]
        return max(0.01, min([self._lease_s / BEATS_PER_LEASE, *(end - now for end in ends)]))

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for job in self._jobs:
            if job.deadline is not None and now >= job.deadline and not job.is_finished:
                self._on_deadline(job)

    async def _beat(self, interval: float) -> None:
        now = time.monotonic()
        due = [job for job in self._jobs if now >= job.lease_until - self._lease_s + interval * 0.9]
        if not due or self._is_stuck():
            return
        replies = await self._scripts.heartbeat(
            self._worker,
            [(job.id, job.epoch) for job in due],
            lease_ms=round(self._lease_s * 1000),
            retention_ms=self._retention_ms,
        )
        self._outage.succeeded()
        for job, reply in zip(due, replies, strict=True):
            if job not in self._jobs:
                continue
            if reply.status is PublishStatus.STALE:
                self._books.fenced["heartbeat"] += 1
                self._on_lost(job, NOT_OURS)
                continue
            job.lease_until = now + self._lease_s
            if reply.cancel and not job.is_finished:
                self._on_cancel(job)

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for job in self._jobs:
            if now >= job.lease_until:
                self._on_lost(job, "the lease ended before it could be renewed")
