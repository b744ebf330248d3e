"""A queue of its own for each test, on each kind of server, with short ways to drive it."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from inferq.protocol.keys import GROUP, Lane, QueueKeys, new_job_id
from inferq.protocol.messages import Event, FinishReason, Job, Terminal, TextPrompt
from inferq.protocol.params import SamplingParams
from inferq.protocol.replies import ClaimedJob, ClaimReply, Load, PublishItem, PublishReply
from inferq.protocol.scripts import QueueScripts

RETENTION_MS = 60_000
LEASE_MS = 30_000
LANES = (Lane.HIGH, Lane.NORMAL, Lane.LOW)


class DrivenQueue:
    """`QueueScripts` with defaults that suit tests: blocks of 16 tokens, a context of 1,000."""

    def __init__(self, client: redis.asyncio.Redis, queue: str) -> None:
        self.redis = client
        self.keys = QueueKeys(queue)
        self.scripts = QueueScripts(client, self.keys)

    async def enqueue(self, *, prompt: int = 10, budget: int | None = 6, **options: Any) -> str:
        """Submit a job that takes one block, unless told otherwise; return its id."""
        job = Job(new_job_id(), TextPrompt("x"), SamplingParams())
        defaults: dict[str, Any] = {"lane": Lane.NORMAL, "queue_limit": 10_000}
        enqueued = await self.scripts.enqueue(
            job,
            prompt_tokens=prompt,
            budget=budget,
            retention_ms=RETENTION_MS,
            **(defaults | options),
        )
        return enqueued.job_id

    async def claim(
        self, worker: str = "a", *, free: int = 1_000_000, **options: Any
    ) -> ClaimReply:
        """Claim with room for all, unless told otherwise."""
        defaults: dict[str, Any] = {
            "idle": False,
            "max_jobs": 100,
            "max_model_len": 1000,
            "block_size": 16,
            "lease_ms": LEASE_MS,
            "max_crashes": 3,
            "retention_ms": RETENTION_MS,
        }
        return await self.scripts.claim(worker, free_tokens=free, **(defaults | options))

    async def publish(self, worker: str, *items: PublishItem) -> list[PublishReply]:
        """Publish with the default lease and retention."""
        return await self.scripts.publish(
            worker, items, lease_ms=LEASE_MS, retention_ms=RETENTION_MS
        )

    async def end(self, worker: str, job: ClaimedJob) -> PublishReply:
        """Publish the terminal event of a job, without further tokens."""
        item = self.item(job, first=job.published, tokens=0, end=FinishReason.STOP)
        [reply] = await self.publish(worker, item)
        return reply

    @staticmethod
    def item(
        job: ClaimedJob, *, first: int, tokens: int, end: FinishReason | None = None
    ) -> PublishItem:
        """One event for each of `tokens` tokens, numbered from `first`, and perhaps the end."""
        events = [
            (n + 1, Event(offset=n, token_ids=(n,), text="x", text_ends=(1,)).encode())
            for n in range(first, first + tokens)
        ]
        if end is not None:
            terminal = Event(offset=first + tokens, terminal=Terminal(end))
            events.append((first + tokens, terminal.encode()))
        return PublishItem(job.job_id, job.epoch, first, tuple(events), end)

    async def cancel(self, job_id: str) -> str:
        """Cancel and return the outcome."""
        return await self.scripts.cancel(job_id, retention_ms=RETENTION_MS)

    async def events(self, job_id: str) -> list[tuple[str, Event]]:
        """The stream ids and events of a job."""
        rows = await self.redis.xrange(self.keys.out(job_id))
        return [(entry.decode(), Event.decode(fields[b"e"])) for entry, fields in rows]

    async def endings(self, job_id: str) -> list[Terminal]:
        """The terminal events of a job; there must never be two."""
        return [e.terminal for _, e in await self.events(job_id) if e.terminal is not None]

    async def end_lease(self, job_id: str) -> None:
        """Make a lease run out without waiting for it."""
        assert await self.redis.zscore(self.keys.leases, job_id) is not None
        await self.redis.zadd(self.keys.leases, {job_id: 1})

    async def pass_deadline(self, job_id: str) -> None:
        """Make a deadline pass without waiting for it."""
        await self.redis.hset(self.keys.job(job_id), "deadline", 1)

    async def pass_delay(self, job_id: str) -> None:
        """Make a delay pass without waiting for it."""
        assert await self.redis.zadd(self.keys.delayed, {job_id: 1}, xx=True, ch=True) == 1

    async def pending(self, worker: str) -> int:
        """How many entries the worker's consumers hold."""
        total = 0
        for lane in LANES:
            if await self.redis.exists(self.keys.jobs(lane)):
                for consumer in await self.redis.xinfo_consumers(self.keys.jobs(lane), GROUP):
                    total += consumer["pending"] if consumer["name"] == worker.encode() else 0
        return total

    async def assert_nothing_is_left(self) -> None:
        """All jobs have ended: no counter, lease, entry or pending entry may remain."""
        assert await self.scripts.load() == Load()
        assert await self.redis.zcard(self.keys.leases) == 0
        assert await self.redis.zcard(self.keys.delayed) == 0
        for lane in LANES:
            stream = self.keys.jobs(lane)
            assert await self.redis.xlen(stream) == 0
            if await self.redis.exists(stream):
                [group] = await self.redis.xinfo_groups(stream)
                assert group["pending"] == 0
