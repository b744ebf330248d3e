"""Random runs of operations against a small model: states, counters and ends always agree."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from inferq.protocol.keys import Lane
from inferq.protocol.messages import FinishReason
from inferq.protocol.replies import ClaimedJob, Load
from inferq.protocol.webhooks import Webhook

STEPS = 250
WORKERS = ("a", "b", "c")
#: When, by the server's clock, a lease ended that is made to end.
ENDED_AT = 5
LEASE_MS = 30_000
WEBHOOK = Webhook("https://example.com/hook")
#: The keys that stay: their number does not grow with the jobs.
ONE_OF_A_QUEUE = ("jobs", "load", "workers", "dead", "leases", "delayed", "outbox")


@dataclass
class ModelJob:
    """What must be true of one job."""

    prompt: int
    budget: int
    state: str
    max_crashes: int
    published: int = 0
    crashes: int = 0
    marked: bool = False
    lease_over: bool = False
    late: bool = False
    finish: str | None = None
    held: ClaimedJob | None = None
    owner: str = ""
    left: bool = False
    has_webhook: bool = False

    @property
    def is_suspect(self) -> bool:
        return self.max_crashes > 1 and self.crashes >= self.max_crashes - 1


@dataclass
class Model:
    """A queue in a dictionary, driven beside the real one."""

    q: Any
    random: random.Random
    max_crashes: int
    jobs: dict[str, ModelJob] = field(default_factory=dict)
    #: The time of the last call before a silence that no call has ended yet.
    silence: int | None = None
    #: Whether leases that ended in a silence are let be.
    excuses: bool = False
    keys: int = 0

    def called(self) -> None:
        """A claim, publish or heartbeat reached the server."""
        if self.silence is not None:
            self.excuses, self.silence = self.silence < ENDED_AT, None

    def pick_held(self) -> str | None:
        """A random job that its worker may still do something with."""
        ids = [i for i, job in self.jobs.items() if job.state == "running" and not job.left]
        return self.random.choice(ids) if ids else None

    def pick(self, *states: str) -> str | None:
        """A random job in one of the states."""
        ids = [job_id for job_id, job in self.jobs.items() if job.state in states]
        return self.random.choice(ids) if ids else None

    def end(self, job_id: str, reason: str) -> None:
        """Note how a job ended."""
        self.jobs[job_id].state = "done"
        self.jobs[job_id].finish = reason

    async def enqueue(self) -> None:
        """Submit a job, sometimes delayed."""
        prompt, budget = self.random.randrange(1, 100), self.random.randrange(1, 100)
        if self.random.random() < 0.2:
            prompt = budget = 0  # an errand
        delayed = self.random.random() < 0.3
        webhook = WEBHOOK if self.random.random() < 0.3 else None
        job_id = await self.q.enqueue(
            prompt=prompt,
            budget=budget,
            lane=self.random.choice(list(Lane)),
            delay_ms=60_000 if delayed else 0,
            deadline_ms=120_000,
            idempotency_key=f"key-{self.keys}" if self.random.random() < 0.3 else None,
            webhook=webhook,
        )
        self.keys += 1
        self.jobs[job_id] = ModelJob(
            prompt,
            budget,
            "delayed" if delayed else "queued",
            self.max_crashes,
            has_webhook=webhook is not None,
        )

    async def claim(self, free: int | None = None) -> None:
        """Claim something that fits; note what the claim ended on its way."""
        worker = self.random.choice(WORKERS)
        if free is None:
            free = self.random.choice((0, 64, 300, 10_000))
        idle = self.random.random() < 0.2
        self.called()
        reply = await self.q.claim(
            worker,
            free=free,
            idle=idle,
            max_jobs=self.random.randrange(1, 6),
            max_crashes=self.max_crashes,
            starve_ms=self.random.choice((0, 60_000)),
            max_errands=self.random.choice((0, 3)),
        )
        self.note_takeovers()
        for claimed in reply.claimed:
            job = self.jobs[claimed.job_id]
            assert job.state in ("queued", "released", "due"), (claimed, job)
            assert claimed.published == job.published
            assert claimed.crashes == job.crashes
            assert claimed.runs_alone == job.is_suspect
            assert not claimed.runs_alone or (idle and len(reply.claimed) == 1)
            job.state, job.held, job.owner = "running", claimed, worker
        for job_id, job in self.jobs.items():
            if job.state == "due":
                job.state = "queued"
            may_wait_unseen = job.state == "queued" or (job.state == "released" and job.is_suspect)
            if may_wait_unseen and job.late and await self.q.endings(job_id):
                self.end(job_id, "expired")

    def note_takeovers(self) -> None:
        """A claim looks at all jobs that are due and at all that were left behind."""
        for job_id, job in self.jobs.items():
            if job.state == "due" and job.late:
                self.end(job_id, "expired")
            elif job.state == "released":
                if job.late and not job.is_suspect:
                    self.end(job_id, "expired")
            elif job.state == "running" and (job.left or (job.lease_over and not self.excuses)):
                if job.marked:
                    self.end(job_id, "cancelled")
                elif job.late:
                    self.end(job_id, "expired")
                else:
                    job.crashes += 1
                    job.lease_over = job.left = False
                    job.state = "released"
                    if job.crashes == self.max_crashes:
                        self.end(job_id, "error")

    async def publish(self) -> None:
        """Publish a few tokens, perhaps the end, perhaps as a worker that lost the job."""
        others = ("released", "done") if self.random.random() < 0.2 else ()
        job_id = self.pick(*others) or self.pick("running")
        if job_id is None or (job := self.jobs[job_id]).held is None:
            return
        first = job.published + self.random.choice((0, 0, 0, -1, 2))
        end = FinishReason.STOP if self.random.random() < 0.3 else None
        tokens = self.random.randrange(0 if end else 1, 4)
        self.called()
        item = self.q.item(job.held, first=max(first, 0), tokens=tokens, end=end)
        [reply] = await self.q.publish(job.owner, item)
        if job.left:
            assert reply.status == "stale"
        elif job.state == "running" and max(first, 0) == job.published:
            assert reply.status == "ok"
            job.published += tokens
            job.lease_over = False
            if end is not None:
                self.end(job_id, "stop")
        elif job.state == "running":
            assert reply.status == "gap"
            job.lease_over = False
        else:
            assert reply.status == ("ok" if job.finish == "stop" else "stale")
        assert reply.offset == job.published

    async def release(self) -> None:
        """Hand a job back."""
        if (job_id := self.pick_held()) is None:
            return
        job = self.jobs[job_id]
        assert job.held is not None
        assert await self.q.scripts.release(job.owner, [(job_id, job.held.epoch, None)]) == 1
        job.state, job.lease_over = "released", False
        if job.marked:
            self.end(job_id, "cancelled")

    async def heartbeat(self) -> None:
        """Renew a lease."""
        if (job_id := self.pick("running")) is None:
            return
        job = self.jobs[job_id]
        assert job.held is not None
        self.called()
        [reply] = await self.q.scripts.heartbeat(
            job.owner, [(job_id, job.held.epoch)], lease_ms=LEASE_MS, retention_ms=LEASE_MS
        )
        assert reply.status == ("stale" if job.left else "ok")
        job.lease_over = job.left

    async def reconcile(self) -> None:
        """Hand back what a worker does not know, or leave what its engine took with it."""
        if (job_id := self.pick_held()) is None:
            return
        job, crashed = self.jobs[job_id], self.random.random() < 0.5
        known = [
            other_id
            for other_id, other in self.jobs.items()
            if other_id != job_id and other.state == "running" and other.owner == job.owner
        ]
        assert await self.q.scripts.reconcile(job.owner, known, crashed=crashed) == 1
        assert await self.q.scripts.reconcile(job.owner, known, crashed=crashed) == 0
        if job.marked:
            self.end(job_id, "cancelled")
        elif crashed:
            job.left = job.lease_over = True
        else:
            job.state, job.lease_over = "released", False

    async def redrive(self) -> None:
        """Submit a job anew that brought its workers down."""
        letters = await self.q.scripts.dead_letters()
        dead = {job_id for job_id, job in self.jobs.items() if job.finish == "error"}
        assert {letter.job_id for letter in letters} <= dead
        if letters:
            old = self.jobs[letters[0].job_id]
            job_id = await self.q.scripts.redrive(letters[0].entry_id)
            self.jobs[job_id] = ModelJob(
                old.prompt,
                old.budget,
                "queued",
                self.max_crashes,
                has_webhook=old.has_webhook,
            )

    async def drain_a_worker(self) -> None:
        """Ask a worker to drain, which is between it and its heartbeat."""
        worker = self.random.choice(WORKERS)
        await self.q.scripts.register(worker, {})
        assert await self.q.scripts.drain(worker)
        assert (await self.q.scripts.register(worker, {})).drain
        await self.q.scripts.unregister(worker)
        assert not (await self.q.scripts.register(worker, {})).drain

    async def recost(self) -> None:
        """Correct the size of a job."""
        if (job_id := self.pick_held()) is None:
            return
        job = self.jobs[job_id]
        assert job.held is not None
        job.prompt, job.budget = self.random.randrange(1, 100), self.random.randrange(1, 100)
        assert await self.q.scripts.recost(
            job.owner, job_id, job.held.epoch, prompt_tokens=job.prompt, budget=job.budget
        )

    async def cancel(self) -> None:
        """Cancel a job in any state."""
        job_id = self.pick("queued", "delayed", "due", "running", "released", "done")
        if job_id is None:
            return
        job = self.jobs[job_id]
        outcome = await self.q.cancel(job_id)
        if job.state == "done":
            assert outcome == ("cancelled" if job.finish == "cancelled" else "finished")
        elif job.state == "running" and not job.lease_over:
            assert outcome == "requested"
            job.marked = True
        else:
            assert outcome == "cancelled"
            self.end(job_id, "cancelled")

    async def pass_time(self) -> None:
        """Let a delay, a lease or a deadline pass."""
        match self.random.randrange(3):
            case 0:
                if job_id := self.pick("delayed"):
                    await self.q.pass_delay(job_id)
                    self.jobs[job_id].state = "due"
            case 1:
                if job_id := self.pick_held():
                    await self.q.redis.zadd(self.q.keys.leases, {job_id: ENDED_AT})
                    self.jobs[job_id].lease_over = True
            case 2 if self.random.random() < 0.5:
                if self.random.random() < 0.5:
                    self.silence = self.random.choice((ENDED_AT - 1, ENDED_AT + 1))
                    await self.q.redis.hset(self.q.keys.load, "seen", self.silence)
                else:
                    await self.end_grace()
            case 2:
                if self.random.random() < 0.3 and (job_id := self.pick("queued", "released")):
                    await self.q.pass_deadline(job_id)
                    self.jobs[job_id].late = True

    async def end_grace(self) -> None:
        """Let the time pass for which ended leases are let be."""
        await self.q.redis.hdel(self.q.keys.load, "seen", "grace")
        self.silence, self.excuses = None, False

    async def sweep(self) -> None:
        """Sweep, which must find nothing to mend."""
        swept = await self.q.scripts.sweep(gone_ms=60_000)
        assert (swept.jobs_put_back, swept.entries_removed) == (0, 0)

    async def check(self) -> None:
        """Compare the server with the model."""
        live = [job for job in self.jobs.values() if job.state != "done"]
        states = [job.state for job in live]
        assert await self.q.scripts.load() == Load(
            queued=states.count("queued") + states.count("released"),
            running=states.count("running"),
            delayed=states.count("delayed") + states.count("due"),
            prompt_tokens=sum(job.prompt for job in live),
            budget_tokens=sum(job.budget for job in live),
        )

    async def check_outbox(self) -> None:
        """Every end of a job with a webhook is in the outbox, once."""
        rows = await self.q.redis.xrange(self.q.keys.outbox)
        found = [(fields[b"id"].decode(), fields[b"finish"].decode()) for _, fields in rows]
        assert sorted(found) == sorted(
            (job_id, job.finish)
            for job_id, job in self.jobs.items()
            if job.has_webhook and job.finish is not None
        )

    async def check_ends(self) -> None:
        """Every job that ended has exactly one terminal event, the last; no other has any."""
        await self.check_outbox()
        for job_id, job in self.jobs.items():
            events = await self.q.events(job_id)
            ends = [e.terminal.finish_reason for _, e in events if e.terminal is not None]
            assert ends == ([job.finish] if job.finish else [])
            tokens = [token for _, event in events for token in event.token_ids]
            assert tokens == list(range(job.published))
            if ends:
                assert events[-1][0] == f"{job.published}-1"
                assert await self.q.redis.pttl(self.q.keys.job(job_id)) > 0
                assert await self.q.redis.pttl(self.q.keys.out(job_id)) > 0

    async def drain(self) -> None:
        """Run everything that is left to its end."""
        while job_id := self.pick("delayed"):
            await self.q.pass_delay(job_id)
            self.jobs[job_id].state = "due"
        await self.end_grace()
        for _ in range(1000):
            if self.pick("queued", "due", "running", "released") is None:
                return
            await self.claim(free=10_000)
            await self.publish()
        pytest.fail("the queue does not run dry")


@pytest.mark.parametrize("seed", range(6))
async def test_any_run_of_operations_balances(q: Any, seed: int) -> None:
    model = Model(q, random.Random(seed), max_crashes=1 + seed % 3)
    operations = [
        *[model.enqueue] * 4,
        *[model.claim] * 3,
        *[model.publish] * 5,
        model.release,
        model.recost,
        model.cancel,
        *[model.pass_time] * 4,
        model.heartbeat,
        model.reconcile,
        model.redrive,
        model.drain_a_worker,
        model.sweep,
    ]
    for _ in range(STEPS):
        await model.random.choice(operations)()
        await model.check()
    await model.check_ends()
    await model.drain()
    await model.check_ends()
    await q.claim(max_jobs=1000)  # removes what cancelled jobs left in the lanes
    await q.assert_nothing_is_left()
    async for key in q.redis.scan_iter(f"{q.keys.prefix}*"):
        name = key.decode().removeprefix(q.keys.prefix).split(":")[0]
        assert name in ONE_OF_A_QUEUE or await q.redis.pttl(key) > 0, key
