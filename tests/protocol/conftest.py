"""A queue of its own for each test, on each kind of server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from driven_queue import RETENTION_MS, DrivenQueue

from inferq.protocol.keys import Lane, new_job_id
from inferq.protocol.messages import Job, TextPrompt
from inferq.protocol.params import SamplingParams


class LongQueue(DrivenQueue):
    """A queue for jobs of long payloads too, which cost no more than a block."""

    has_long = False

    async def enqueue_long(self, size: int, *, lane: Lane = Lane.NORMAL, **options: Any) -> str:
        """Submit a job whose prompt has `size` bytes; return its id."""
        self.has_long = True
        job = Job(new_job_id(), TextPrompt("x" * size), SamplingParams(truncate_prompt_tokens=9))
        defaults: dict[str, Any] = {"prompt_tokens": 9, "budget": 6, "queue_limit": 10_000}
        enqueued = await self.scripts.enqueue(
            job, lane=lane, retention_ms=RETENTION_MS, **(defaults | options)
        )
        return enqueued.job_id


@pytest.fixture
async def q(redis_client: redis.asyncio.Redis, queue: str) -> AsyncIterator[LongQueue]:
    """A queue that no other test uses."""
    made = LongQueue(redis_client, queue)
    yield made
    if made.has_long:  # the server is there for all tests
        async for key in redis_client.scan_iter(match=f"{made.keys.prefix}*", count=1000):
            await redis_client.delete(key)
