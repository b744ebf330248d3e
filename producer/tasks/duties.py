"""The tasks that RQ performs, by name: each takes the queue that it is for."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import structlog

from inferq.producer.async_client import DEFAULT_TIMEOUT_S
from inferq.producer.partitions import Partitions
from inferq.producer.server import RedisServer
from inferq.producer.tasks.addresses import CheckedBackend
from inferq.producer.tasks.batches import (
    EXPIRE_BATCHES,
    RUN_BATCHES,
    expire_batches,
    run_batches,
)
from inferq.producer.tasks.counts import Counted, TaskCounts
from inferq.producer.tasks.deliveries import DeliveryStore, TakenDelivery
from inferq.producer.tasks.safe_rq import TaskRefused, Tasks
from inferq.producer.tasks.sending import Attempt, Outcome, Sender
from inferq.producer.tasks.settings import TasksSettings
from inferq.producer.tasks.signing import Secrets
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import QueueKeys, TaskKeys
from inferq.protocol.trace_context import trace_id_of
from inferq.protocol.upkeep import UpkeepScripts
from inferq.runtime.tracing import Kind

if TYPE_CHECKING:
    from inferq.runtime.spans import Tracing

logger = structlog.get_logger("inferq.tasks")

#: The names that tasks go by in RQ.
DELIVER: Final = "deliver_webhooks"
SWEEP: Final = "sweep"
PROMOTE: Final = "promote_delayed"
TRIM: Final = "trim_dead_letters"

#: Seconds between two looks for old dead letters.
TRIM_INTERVAL_S: Final = 3600.0
#: Deliveries made at once.
AT_ONCE: Final = 32
#: Seconds for which one task goes on as long as more is due, so that others get their turn.
DELIVER_FOR_S: Final = 60.0
#: Seconds that a delivery stays taken beyond the time that it may last.
LEASE_MARGIN_S: Final = 60.0
#: Seconds' worth of calls that a host may get at once.
BURST_S: Final = 1.0
#: Milliseconds without a report after which a worker is gone, as workers see it.
GONE_AFTER_MS: Final = 300_000


class Duties:
    """What a tasks process can do for the queues of its settings.

    `is_stopping` says whether a task that lasts should come to an end.
    """

    def __init__(
        self,
        settings: TasksSettings,
        is_stopping: Callable[[], bool] = lambda: False,
        counts: TaskCounts | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._settings = settings
        self._is_stopping = is_stopping
        self._counts = counts or TaskCounts()

    @property
    def tasks(self) -> Tasks:
        """The tasks by name."""
        return {
            DELIVER: self.deliver_webhooks,
            SWEEP: self.sweep,
            PROMOTE: self.promote_delayed,
            TRIM: self.trim_dead_letters,
            RUN_BATCHES: self.run_batches,
            EXPIRE_BATCHES: self.expire_batches,
        }

    async def deliver_webhooks(self, queue: str) -> None:
        """Make the deliveries that are due, until there are no more or the process is to end.

        After `DELIVER_FOR_S` the rest is left to the next task, so that others get their turn.
        """
        async with self._partitions(queue) as partitions:
            server = partitions.server_of(TaskKeys.PREFIX)
            store = DeliveryStore(server, queue)
            round_ = _Round(self._settings, store, self._counts, self._tracing)
            stop_at = time.monotonic() + DELIVER_FOR_S
            # a round more could be killed amidst its calls, which are made again then
            while not self._is_stopping() and await round_.run() and time.monotonic() < stop_at:
                pass

    async def sweep(self, queue: str) -> None:
        """Tidy up behind dead workers, put back what they lost, and count the load anew."""
        async with self._partitions(queue) as partitions:
            for server, scripts in _upkeep(partitions):
                swept = await server.call(partial(scripts.sweep, gone_ms=GONE_AFTER_MS))
                wrong = await server.call(scripts.recount)
                logger.debug("swept", key=scripts.keys.prefix, swept=swept, wrong_counters=wrong)
                if wrong:
                    logger.warning("counters were wrong", key=scripts.keys.prefix, counters=wrong)

    async def promote_delayed(self, queue: str) -> None:
        """Move delayed jobs that are due into their lanes, where an autoscaler sees them."""
        async with self._partitions(queue) as partitions:
            for server, scripts in _upkeep(partitions):
                while await server.call(partial(scripts.promote, retention_ms=1)):
                    pass

    async def trim_dead_letters(self, queue: str) -> None:
        """Remove dead letters that are too old."""
        age_ms = int(self._settings.dead_letter_age_s * 1000)
        async with self._partitions(queue) as partitions:
            for server, scripts in _upkeep(partitions):
                trimmed = await server.call(partial(scripts.trim_dead_letters, age_ms=age_ms))
                if trimmed:
                    logger.info("dead letters trimmed", key=scripts.keys.prefix, number=trimmed)

    async def run_batches(self, queue: str) -> None:
        """Run the batches that are due, until there are no more or others want a turn."""
        self._check_queue(queue)
        await run_batches(self._settings, queue, self._is_stopping, self._counts.kept)

    async def expire_batches(self, queue: str) -> None:
        """Remove files and batches whose time is over."""
        self._check_queue(queue)
        await expire_batches(self._settings, queue, self._is_stopping)

    def _check_queue(self, queue: str) -> None:
        if queue not in self._settings.queues:
            raise TaskRefused(f"queue {queue!r} is not one of this process's")

    @asynccontextmanager
    async def _partitions(self, queue: str) -> AsyncIterator[Partitions]:
        self._check_queue(queue)
        partitions = Partitions(
            self._settings.redis_url.get_secret_value(),
            queue,
            self._settings.partitions,
            timeout_s=DEFAULT_TIMEOUT_S,
        )
        try:
            yield partitions
        finally:
            await partitions.aclose()


def _upkeep(partitions: Partitions) -> list[tuple[RedisServer, UpkeepScripts]]:
    return [
        (server, UpkeepScripts(server.commands, QueueKeys(partitions.queue, partition)))
        for partition in range(partitions.number)
        for server in (partitions.server(partition),)
    ]


def _read_secrets(settings: TasksSettings) -> Secrets:
    """Return the secrets; none while their file is bad, which costs each delivery a try."""
    try:
        return settings.read_secrets()
    except InvalidRequestError as error:
        logger.error("secrets cannot be read", error=str(error))
        return {}


class _Round:
    """Takes deliveries that are due and makes them, some at once."""

    def __init__(
        self,
        settings: TasksSettings,
        store: DeliveryStore,
        counts: TaskCounts,
        tracing: Tracing | None,
    ) -> None:
        self._tracing = tracing
        self._settings = settings
        self._store = store
        self._counts = counts
        self._interval_ms = 1000 / settings.webhook_host_rate
        self._early_ms = max(BURST_S * 1000 - self._interval_ms, 0.0)
        self._sender = Sender(
            _read_secrets(settings),
            CheckedBackend([ipaddress.ip_network(n) for n in settings.webhook_allowed_networks]),
            timeout_s=settings.webhook_timeout_s,
            allow_http=settings.webhook_allow_http,
        )

    async def run(self) -> bool:
        """Make one round; return whether there was anything to do.

        A fault of one delivery is raised once the others are through: ended amidst their calls,
        they would be made twice.
        """
        lease_s = self._settings.webhook_timeout_s + LEASE_MARGIN_S
        taken = await self._store.take(most=AT_ONCE, lease_ms=int(lease_s * 1000))
        waiting: dict[str, int] = {}
        delivering: list[asyncio.Task[None]] = []
        try:
            for delivery in taken:
                host = urlsplit(delivery.url).hostname or ""
                if await self._may_call(delivery, host, waiting):
                    delivering.append(asyncio.create_task(self._deliver(delivery, host)))
        finally:
            ends = await asyncio.gather(*delivering, return_exceptions=True)
        for end in ends:
            if end is not None:
                raise end
        return bool(taken)

    async def _may_call(self, delivery: TakenDelivery, host: str, waiting: dict[str, int]) -> bool:
        """Whether there is an attempt to make now; if not, what becomes of it is reported."""
        most = len(self._settings.webhook_retry_delays_s) + 1
        if delivery.attempt > most:
            # its last attempt took the process down, or was never reported
            await self._store.report(
                delivery, Outcome.DEAD, reason=f"{most} attempts were begun", host=host
            )
            self._counts.add(Counted.ATTEMPT, Outcome.DEAD)
            return False
        wait_ms = await self._store.pace(
            host, interval_ms=self._interval_ms, early_ms=self._early_ms
        )
        if wait_ms == 0:
            return True
        # those that wait for the same host come back one after the other
        place = waiting.get(host, 0)
        waiting[host] = place + 1
        next_ms = wait_ms + int(place * self._interval_ms)
        await self._store.report(delivery, "postponed", next_ms=next_ms)
        self._counts.add(Counted.ATTEMPT, "postponed")
        return False

    async def _deliver(self, delivery: TakenDelivery, host: str) -> None:
        began = time.monotonic()
        attempt = await self._send(delivery, host)
        took_ms = int((time.monotonic() - began) * 1000)
        outcome, next_ms = self._judge(delivery, attempt)
        if attempt.pause_s > 0:
            pause_ms = int(attempt.pause_s * 1000)
            await self._store.pause(host, pause_ms=pause_ms, early_ms=self._early_ms)
        await self._store.report(
            delivery,
            outcome,
            next_ms=next_ms,
            reason=attempt.reason,
            status=attempt.status,
            took_ms=took_ms,
            host=host,
        )
        self._counts.add(Counted.ATTEMPT, outcome)
        log = logger.info if outcome is Outcome.DELIVERED else logger.warning
        log(
            "webhook",
            outcome=outcome.value,
            **delivery.names,
            delivery=delivery.delivery_id,
            attempt=delivery.attempt,
            host=host,
            status=attempt.status,
            reason=attempt.reason,
            took_ms=took_ms,
        )

    async def _send(self, delivery: TakenDelivery, host: str) -> Attempt:
        """Make the attempt, as a part of the job's trace where there are traces."""
        if self._tracing is None:
            return await self._sender.send(delivery)
        span = self._tracing.span(
            "webhook",
            Kind.CLIENT,
            parent=delivery.trace,
            trace_id=trace_id_of(delivery.job_id),
            attributes={
                "http.request.method": "POST",
                "server.address": host,
                "messaging.message.id": delivery.job_id,
                "inferq.attempt": delivery.attempt,
            },
        )
        try:
            attempt = await self._sender.send(delivery, span.context)
            if attempt.status:
                span.set({"http.response.status_code": attempt.status})
            if attempt.outcome is not Outcome.DELIVERED:
                span.fail(str(attempt.status or attempt.outcome.value))
        except BaseException as error:
            span.fail(type(error).__name__)
            raise
        finally:
            span.end()
        return attempt

    def _judge(self, delivery: TakenDelivery, attempt: Attempt) -> tuple[Outcome, int]:
        """Return what becomes of the delivery, and in how many ms it is tried again."""
        delays = self._settings.webhook_retry_delays_s
        if attempt.outcome is not Outcome.RETRY:
            return attempt.outcome, 0
        if delivery.attempt > len(delays):
            return Outcome.DEAD, 0
        # by up to a tenth more, so that what failed together does not come back together
        delay_s = delays[delivery.attempt - 1] * random.uniform(1.0, 1.1)  # noqa: S311 - no secret
        return Outcome.RETRY, int(max(delay_s, attempt.pause_s) * 1000)
