"""Looking after silent streams, so that no reader waits for a job that is gone or has expired."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from inferq.producer.server import RedisServer
from inferq.producer.subscription import Entry, Subscription
from inferq.protocol.errors import (
    InferqError,
    JobError,
    JobNotFound,
    ServerLost,
    StreamExpired,
)
from inferq.protocol.keys import new_job_id
from inferq.protocol.replies import ExpireOutcome, ExpireReply
from inferq.protocol.scripts import QueueScripts


class Probe:
    """Checks on jobs of one partition whose streams have been silent for a while."""

    def __init__(self, server: RedisServer, scripts: QueueScripts, *, retention_ms: int) -> None:
        self._server = server
        self._scripts = scripts
        self._retention_ms = retention_ms

    async def look_after(self, subscriptions: Sequence[Subscription], now: float) -> None:
        """End the subscriptions whose job is gone, and the jobs whose deadline has passed.

        One round trip for all, and one more for each job whose deadline is unknown or has come. A
        subscription whose job cannot be read is ended alone. Raises `ServerLost`.
        """
        try:
            replies = await self._server.call(lambda: self._look(subscriptions))
        except ServerLost:
            raise
        except InferqError as error:
            if len(subscriptions) == 1:
                await self._refuse(subscriptions[0], error)
                return
            # one damaged key fails the look at all: find out whose it is
            for subscription in subscriptions:
                await self.look_after([subscription], now)
            return
        checks = []
        for subscription, exists, last in zip(
            subscriptions, replies[::2], replies[1::2], strict=True
        ):
            end = Entry.from_redis(*last[0]) if last else None
            if end is not None and end.is_terminal:
                # otherwise the read that comes next brings it
                if end.position < subscription.cursor:
                    subscription.end_early(end)
            elif not exists:
                subscription.fail(_gone(subscription))
            elif subscription.deadline <= now:
                checks.append(self._check_deadline(subscription, now))
        await asyncio.gather(*checks)

    async def _look(self, subscriptions: Sequence[Subscription]) -> list[Any]:
        keys = self._scripts.keys
        pipeline = self._server.commands.pipeline(transaction=True)
        for subscription in subscriptions:
            pipeline.exists(keys.job(subscription.job_id))
            pipeline.xrevrange(keys.out(subscription.job_id), count=1)
        return list(await pipeline.execute())

    async def _check_deadline(self, subscription: Subscription, now: float) -> None:
        """Have the server end the job if its deadline has passed, else remember the deadline."""
        job_id = subscription.job_id
        try:
            reply = await self._expire(job_id)
        except ServerLost:
            raise
        except InferqError as error:
            await self._refuse(subscription, error)
            return
        if reply.outcome is ExpireOutcome.FINISHED:
            # asked after the end, so a stream that is there has its terminal event
            out = self._scripts.keys.out(job_id)
            if not await self._server.call(lambda: self._server.commands.exists(out)):
                subscription.fail(StreamExpired(job_id))
        elif reply.deadline_in_ms is None:
            subscription.deadline = math.inf
        else:
            subscription.deadline = now + reply.deadline_in_ms / 1000

    async def _expire(self, job_id: str) -> ExpireReply:
        return await self._server.call(
            lambda: self._scripts.expire(job_id, retention_ms=self._retention_ms)
        )

    async def _refuse(self, subscription: Subscription, reason: InferqError) -> None:
        """End a subscription alone, unless it is no better for a job that there never was."""
        nobody = Subscription(new_job_id(self._scripts.keys.partition), 0)
        try:
            await self._server.call(lambda: self._look([nobody]))
            await self._expire(nobody.job_id)
        except ServerLost:
            raise
        except InferqError as error:
            raise ServerLost(str(error)) from error
        subscription.refuse(reason)


def _gone(subscription: Subscription) -> JobError:
    """Return what to say of a job without a record: it is not known, unless it was read from."""
    kind = StreamExpired if subscription.cursor > (0, 0) else JobNotFound
    return kind(subscription.job_id)
