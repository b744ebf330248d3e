"""The loop of a tasks process: moves ended jobs out of the outboxes, and gives out tasks."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from functools import partial
from typing import Any, Final

import structlog
from redis import Redis
from redis.exceptions import RedisError

from inferq.producer.async_client import DEFAULT_TIMEOUT_S
from inferq.producer.partitions import Partitions
from inferq.producer.tasks.batches import EXPIRE_BATCHES, EXPIRE_INTERVAL_S, RUN_BATCHES
from inferq.producer.tasks.deliveries import DeliveryStore
from inferq.producer.tasks.duties import AT_ONCE, DELIVER, PROMOTE, SWEEP, TRIM, TRIM_INTERVAL_S
from inferq.producer.tasks.outbox import to_delivery
from inferq.producer.tasks.safe_rq import SafeQueue, task_queue
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.errors import DecodeError, InferqError, InvalidRequestError
from inferq.protocol.keys import BatchKeys, QueueKeys, TaskKeys
from inferq.protocol.messages import Event
from inferq.protocol.upkeep import UpkeepScripts
from inferq.protocol.webhooks import OutboxEntry

logger = structlog.get_logger("inferq.tasks")

#: Ends moved in one go.
MOVED_AT_ONCE: Final = 100
#: Longest pause in seconds while the server is away.
LONGEST_PAUSE_S: Final = 5.0
#: Seconds after which a worker is asked again to run batches, if none has begun.
ASKED_S: Final = 60.0
#: Seconds without a round that succeeded after which the process is not ready, and not alive.
READY_S: Final = 30.0
LIVE_S: Final = 300.0


class QueueConductor:
    """What is to be done for one queue; several processes may conduct the same one."""

    def __init__(self, settings: TasksSettings, queue: str, connection: Redis) -> None:
        self.queue = queue
        self._settings = settings
        self._partitions = Partitions(
            settings.redis_url.get_secret_value(),
            queue,
            settings.partitions,
            timeout_s=DEFAULT_TIMEOUT_S,
        )
        self._store = DeliveryStore(self._partitions.server_of(TaskKeys.PREFIX), queue)
        self._tasks: SafeQueue = task_queue(connection, queue)
        self._intervals: dict[str, float] = {
            SWEEP: settings.sweep_interval_s,
            PROMOTE: settings.promote_interval_s,
            TRIM: TRIM_INTERVAL_S,
        }

    async def run_once(self) -> None:
        """Move what has ended, and give out the tasks that are due."""
        for partition in range(self._partitions.number):
            while await self._move(partition):
                pass
        await self._give_deliveries()
        if self._settings.batch_storage is not None:
            await self._give_batches()
            await self._give_at_intervals(EXPIRE_BATCHES, EXPIRE_INTERVAL_S, for_all_queues=True)
        for duty, interval_s in self._intervals.items():
            await self._give_at_intervals(duty, interval_s)

    async def has_tasks(self) -> bool:
        """Whether tasks wait to be performed."""
        return await asyncio.to_thread(lambda: self._tasks.count) > 0

    async def aclose(self) -> None:
        """Close the connections."""
        await self._partitions.aclose()

    async def _move(self, partition: int) -> bool:
        """Move ends from a partition's outbox to the deliveries; return whether there are more.

        The delivery is recorded before the entry goes, under an id that is the job's: whoever does
        it again, after a crash or at the same time, finds it there.
        """
        server = self._partitions.server(partition)
        scripts = UpkeepScripts(server.commands, QueueKeys(self.queue, partition))
        entries = await server.call(lambda: scripts.outbox(count=MOVED_AT_ONCE))
        for entry in entries:
            try:
                last = await server.call(partial(scripts.last_event, entry.job_id))
                await self._accept(entry, last)
            except (DecodeError, InvalidRequestError) as error:
                logger.error("not a webhook", job_id=entry.job_id, reason=str(error))
        await server.call(lambda: scripts.remove_from_outbox([e.entry_id for e in entries]))
        return len(entries) == MOVED_AT_ONCE

    async def _accept(self, entry: OutboxEntry, last: Event | None) -> None:
        delivery = to_delivery(entry, last, queue=self.queue)
        if delivery is not None and await self._store.accept(delivery):
            logger.debug("webhook accepted", job_id=entry.job_id, told=delivery.event)

    async def _give_deliveries(self) -> None:
        """Have as many workers deliver as there is work for, less those that are asked already."""
        due = await self._store.count_due()
        if due == 0:
            return
        wanted = min(self._settings.workers, math.ceil(due / AT_ONCE))
        asked = await asyncio.to_thread(lambda: self._tasks.count)
        for _ in range(wanted - asked):
            await asyncio.to_thread(self._tasks.give, DELIVER, self.queue)

    async def _give_batches(self) -> None:
        """Have a worker run what is due, unless one is asked already; it says when it begins."""
        keys = BatchKeys()

        async def count(redis: Any) -> int:
            seconds, microseconds = await redis.time()
            now = seconds * 1000 + microseconds // 1000
            return int(await redis.zcount(keys.due(self.queue), "-inf", now))

        server = self._partitions.server_of(BatchKeys.PREFIX)
        if await server.call(lambda: count(server.commands)):
            await self._give_at_intervals(RUN_BATCHES, ASKED_S)

    async def _give_at_intervals(
        self, duty: str, interval_s: float, *, for_all_queues: bool = False
    ) -> None:
        interval_ms = int(interval_s * 1000)
        if await self._store.claim_interval(duty, interval_ms, for_all_queues=for_all_queues):
            await asyncio.to_thread(self._tasks.give, duty, self.queue)


class Conductor:
    """Conducts all queues of the settings until told to stop; rides out a server that is away."""

    def __init__(self, settings: TasksSettings, connection: Redis) -> None:
        self._settings = settings
        self._queues = [QueueConductor(settings, queue, connection) for queue in settings.queues]
        self._succeeded_at = time.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        """Conduct until `stop` is set."""
        pause_s = self._settings.poll_interval_s
        while not stop.is_set():
            try:
                await self.run_once()
                pause_s = self._settings.poll_interval_s
            except (InferqError, RedisError, OSError) as error:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                logger.warning("cannot conduct", error=str(error), again_in_s=pause_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause_s)

    async def run_once(self) -> None:
        """Make one round over all queues."""
        for queue in self._queues:
            await queue.run_once()
        self._succeeded_at = time.monotonic()

    async def has_tasks(self) -> bool:
        """Whether tasks of any queue wait to be performed."""
        return any([await queue.has_tasks() for queue in self._queues])

    def check_ready(self) -> str | None:
        """Say why no task can be given out; None while they can."""
        return self._check(READY_S)

    def check_live(self) -> str | None:
        """Say why the process should be started anew; None while it should not."""
        return self._check(LIVE_S)

    async def aclose(self) -> None:
        """Close the connections."""
        for queue in self._queues:
            await queue.aclose()

    def _check(self, longest_s: float) -> str | None:
        silent_s = time.monotonic() - self._succeeded_at
        return None if silent_s < longest_s else f"no round succeeded for {silent_s:.0f} s"
