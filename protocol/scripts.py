"""The atomic operations of the protocol: one `.lua` file each, called by name."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgpack
import redis.asyncio

from inferq.protocol.connection import decodes_responses, translate_errors
from inferq.protocol.digest import content_digest
from inferq.protocol.errors import DecodeError, IdempotencyConflict, InvalidRequestError, QueueFull
from inferq.protocol.keys import LANE_WEIGHTS, Lane, QueueKeys, new_job_id, partition_of
from inferq.protocol.messages import MAX_JOB_BYTES, Job
from inferq.protocol.param_checks import check_size, check_wait
from inferq.protocol.replies import (
    CancelOutcome,
    ClaimedJob,
    ClaimReply,
    DeadLetter,
    Enqueued,
    ExpireOutcome,
    ExpireReply,
    JobStatus,
    Load,
    PublishItem,
    PublishReply,
    QueueLength,
    QueueOverview,
    Registered,
    Swept,
)
from inferq.protocol.script_call import call_script, read_script
from inferq.protocol.stream_pages import read_pages
from inferq.protocol.trace_context import TraceContext
from inferq.protocol.webhooks import Webhook
from inferq.protocol.wire import number, text, unpack

#: The cost of a job without a budget; a claim counts no job as larger than the model's context.
UNBOUNDED_COST: Final = 2**31 - 1
#: Longest deadline or delay, in ms (about 34 years).
MAX_WAIT_MS: Final = 2**40
#: Longest idempotency key, in bytes.
MAX_KEY_BYTES: Final = 256
#: Longest note of a producer, in bytes.
MAX_NOTE_BYTES: Final = 4096
#: Ends in a partition's outbox at which jobs with a webhook are refused.
MAX_OUTBOX: Final = 100_000
#: Longest retention, in ms: ten years.
MAX_RETENTION_MS: Final = 10 * 365 * 86_400_000
#: Longest heartbeat that is read, in bytes.
MAX_REPORT_BYTES: Final = 2**16
#: How long, in ms, a wish to drain a worker stands.
DRAIN_MARK_MS: Final = 600_000
#: How long, in ms, smaller jobs may pass one that does not fit; a worker's setting.
STARVE_MS: Final = 2_000

_FOLDER: Final = "inferq.protocol.lua"
_LANES: Final = (Lane.HIGH, Lane.NORMAL, Lane.LOW)


class QueueScripts:
    """The atomic operations on one partition of a queue.

    `client` must not decode responses. The server's clock is the only one; durations are in ms.
    Every method raises `ServerLost` when the server cannot be reached or refuses us.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: QueueKeys) -> None:
        if decodes_responses(client):
            raise InvalidRequestError("must not decode responses", field="client")
        self._redis = client
        self.keys = keys
        self._fixed_keys = (
            keys.load,
            keys.leases,
            keys.delayed,
            keys.dead,
            keys.workers,
            *(keys.jobs(lane) for lane in _LANES),
        )

    async def _call(self, name: str, *args: str | bytes | int, keys: Sequence[str] = ()) -> Any:
        with translate_errors(self._redis):
            script = read_script(_FOLDER, "prelude", name)
            return await call_script(self._redis, script, (*self._fixed_keys, *keys), args)

    async def _read(self, command: Awaitable[Any]) -> Any:
        with translate_errors(self._redis):
            return await command

    async def enqueue(
        self,
        job: Job,
        *,
        lane: Lane,
        prompt_tokens: int,
        budget: int | None,
        queue_limit: int,
        retention_ms: int,
        deadline_ms: int | None = None,
        delay_ms: int = 0,
        idempotency_key: str | None = None,
        digest: str | None = None,
        note: bytes | None = None,
        webhook: Webhook | None = None,
    ) -> Enqueued:
        """Submit a job, once however often it is called.

        `digest` stands for the content where an idempotency key is compared; by default it is
        `content_digest` of the job, which counts a seed that was drawn. Raises `QueueFull` at
        `queue_limit` queued and delayed jobs, when the server's memory is full or when too many
        ends wait for their webhooks (only for a job with one), and `IdempotencyConflict` when the
        key belongs to a job with other content.
        """
        return await self.enqueue_payload(
            job.id,
            job.encode(),
            digest=digest or _digest(job),
            lane=lane,
            prompt_tokens=prompt_tokens,
            budget=budget,
            queue_limit=queue_limit,
            retention_ms=retention_ms,
            deadline_ms=deadline_ms,
            delay_ms=delay_ms,
            idempotency_key=idempotency_key,
            note=note,
            webhook=webhook,
            trace=job.trace,
        )

    async def enqueue_payload(
        self,
        job_id: str,
        payload: bytes,
        *,
        digest: str,
        lane: Lane,
        prompt_tokens: int,
        budget: int | None,
        queue_limit: int,
        retention_ms: int,
        deadline_ms: int | None = None,
        delay_ms: int = 0,
        idempotency_key: str | None = None,
        note: bytes | None = None,
        webhook: Webhook | None = None,
        trace: TraceContext | None = None,
    ) -> Enqueued:
        """Do what `enqueue` does for a job that is encoded already."""
        self._check_partition(job_id)
        check_size("job", len(payload), MAX_JOB_BYTES)
        check_wait("delay", delay_ms, 0, MAX_WAIT_MS)
        _check_retention(retention_ms)
        if deadline_ms is not None:
            check_wait("deadline", deadline_ms, delay_ms + 1, MAX_WAIT_MS)
        if idempotency_key is not None:
            check_size("idempotency_key", len(idempotency_key.encode()), MAX_KEY_BYTES)
            if not idempotency_key:
                raise InvalidRequestError("is empty", field="idempotency_key", limit=1)
        check_size("note", len(note or b""), MAX_NOTE_BYTES)
        key = idempotency_key or ""
        status, detail = await self._call(
            "enqueue",
            job_id,
            payload,
            lane.value,
            prompt_tokens,
            -1 if budget is None else budget,
            _cost(prompt_tokens, budget),
            deadline_ms or 0,
            delay_ms,
            digest,
            queue_limit,
            retention_ms,
            key,
            note or b"",
            b"" if webhook is None else webhook.encode(trace),
            MAX_OUTBOX,
            keys=(self.keys.idem(key),) if key else (),
        )
        match status:
            case b"full":
                raise QueueFull(
                    f"the queue holds {detail} jobs, its limit is {queue_limit}",
                    depth=int(detail),
                    limit=queue_limit,
                )
            case b"outbox_full":
                raise QueueFull(
                    f"{detail} ended jobs wait for their webhooks: does `inferq tasks` run?",
                    depth=int(detail),
                    limit=MAX_OUTBOX,
                )
            case b"conflict":
                raise IdempotencyConflict(key, detail.decode())
            case b"taken":
                raise InvalidRequestError(
                    f"{job_id} was used before, for a job with other content", field="job_id"
                )
        return Enqueued(detail.decode(), created=status == b"created")

    async def claim(
        self,
        worker: str,
        *,
        free_tokens: int,
        idle: bool,
        max_jobs: int,
        max_model_len: int,
        block_size: int,
        lease_ms: int,
        max_crashes: int,
        retention_ms: int,
        starve_ms: int = STARVE_MS,
        max_errands: int = 0,
    ) -> ClaimReply:
        """Take the jobs that fit `free_tokens`, those left behind by other workers first.

        A job takes its cost, rounded up to whole blocks; a bound that no worker has replaced by an
        exact count counts as `max_model_len` at most. An `idle` worker is given one job whatever
        its cost. Jobs of cost 0, at most `max_errands`, do not count among the `max_jobs`. The job
        whose payload brings the reply to 1 MiB is the last; `next_due_ms` is 0 if there are more.
        """
        rows, tails, due, waiting = await self._call(
            "claim",
            worker,
            free_tokens,
            int(idle),
            max_jobs,
            max_model_len,
            block_size,
            lease_ms,
            max_crashes,
            retention_ms,
            starve_ms,
            *(LANE_WEIGHTS[lane] for lane in _LANES),
            max_errands,
        )
        return ClaimReply(
            claimed=tuple(ClaimedJob.from_row(row) for row in rows),
            lane_tails={lane: tail.decode() for lane, tail in zip(_LANES, tails, strict=True)},
            next_due_ms=None if due < 0 else due,
            waiting=bool(waiting),
        )

    async def publish(
        self, worker: str, items: Sequence[PublishItem], *, lease_ms: int, retention_ms: int
    ) -> list[PublishReply]:
        """Append events of many jobs, renew their leases and end those that are through.

        Atomic for each item. A retry is safe: what the server has already is answered `gap` with
        its offset, and an end that it has already `ok`.
        """
        # One argument, and one string for a reply: at each end a fraction of the work of many.
        wire = msgpack.packb(
            [(i.job_id, i.epoch, i.first, i.terminal or "", i.events) for i in items],
            use_bin_type=False,  # Lua has one kind of string
        )
        reply = await self._call("publish", worker, lease_ms, retention_ms, wire)
        return [
            PublishReply.from_row(item.job_id, row)
            for item, row in zip(items, msgpack.unpackb(reply, raw=True), strict=True)
        ]

    async def heartbeat(
        self, worker: str, leases: Sequence[tuple[str, int]], *, lease_ms: int, retention_ms: int
    ) -> list[PublishReply]:
        """Renew the leases of jobs (id, epoch) that have no new events; `stale` ones are lost."""
        args = [value for lease in leases for value in lease]
        rows = await self._call("heartbeat", worker, lease_ms, retention_ms, *args)
        return [
            PublishReply.from_row(job_id, row)
            for (job_id, _), row in zip(leases, rows, strict=True)
        ]

    async def recost(
        self, worker: str, job_id: str, epoch: int, *, prompt_tokens: int, budget: int
    ) -> bool:
        """Replace the bounds of a running job's size by exact counts; false if it is not ours."""
        return bool(await self._call("recost", worker, job_id, epoch, prompt_tokens, budget))

    async def release(self, worker: str, jobs: Sequence[tuple[str, int, int | None]]) -> int:
        """Hand back jobs (id, epoch, exact cost if known); return how many were this worker's.

        Any worker may claim them at once and goes on at their offset; no crash is counted.
        """
        args = [v for job_id, epoch, cost in jobs for v in (job_id, epoch, _or_empty(cost))]
        return int(await self._call("release", worker, *args))

    async def reconcile(self, worker: str, held: Sequence[str], *, crashed: bool = False) -> int:
        """Hand back jobs claimed in a reply that was lost; `held` are the ids this worker knows.

        With `crashed`, whoever ran the others is gone: the next claim counts a crash of each.
        Returns their number. Cheap when there are none; not to be called during a claim. Calls the
        server once for each thousand of the worker's jobs or less, so that others get their turn.
        """
        returned, stopped = 0, b""
        while True:
            more, stopped = await self._call("reconcile", worker, int(crashed), stopped, *held)
            returned += int(more)
            if not stopped:
                return returned

    async def reject(
        self, worker: str, job_id: str, epoch: int, *, code: str, message: str, retention_ms: int
    ) -> bool:
        """End a claimed job that cannot be decoded, with a dead letter; false if it is not ours."""
        args = (worker, job_id, epoch, code, message, retention_ms)
        return bool(await self._call("reject", *args))

    async def cancel(self, job_id: str, *, retention_ms: int) -> CancelOutcome:
        """End a job at once, or ask the worker that holds it to."""
        self._check_partition(job_id)
        _check_retention(retention_ms)
        return CancelOutcome((await self._call("cancel", job_id, retention_ms)).decode())

    async def expire(self, job_id: str, *, retention_ms: int) -> ExpireReply:
        """End a job if its deadline has passed and no worker holds it; any reader may ask."""
        self._check_partition(job_id)
        _check_retention(retention_ms)
        outcome, left = await self._call("expire", job_id, retention_ms)
        return ExpireReply(ExpireOutcome(outcome.decode()), None if left < 0 else left)

    async def status(self, job_id: str) -> JobStatus | None:
        """Return what the server knows of a job; None if it is unknown, or forgotten."""
        self._check_partition(job_id)
        values = await self._read(self._redis.hmget(self.keys.job(job_id), JobStatus.FIELDS))
        return JobStatus.from_values(job_id, values) if values[0] else None

    async def load(self) -> Load:
        """Return the queue's counters."""
        names = list(Load.__slots__)
        values = await self._read(self._redis.hmget(self.keys.load, names))
        return Load(**{name: int(value or 0) for name, value in zip(names, values, strict=True)})

    async def length(self, *, limit: int) -> QueueLength:
        """Return how long the queue is; `limit` is what submissions go by."""
        names = ("queued", "running", "delayed", "ended")
        values = await self._read(self._redis.hmget(self.keys.load, names))
        queued, running, delayed, ended = map(number, values)
        return QueueLength(queued, running, delayed, finished_total=ended, limit=limit)

    async def forget(self, *job_ids: str) -> int:
        """Let go of the records, the events and the keys of jobs, before their time.

        Return how many; those that have not ended stay as they are. An idempotency key of one that
        is gone stands for another job from then on.
        """
        for job_id in job_ids:
            self._check_partition(job_id)
        return int(await self._call("forget", *job_ids))

    async def find(self, idempotency_key: str) -> str | None:
        """Return the id of the job that an idempotency key belongs to, if there is one."""
        holder = await self._read(self._redis.get(self.keys.idem(idempotency_key)))
        return text(holder).partition(" ")[0] or None

    async def overview(self) -> QueueOverview:
        """Return what the queue holds, all of one moment."""
        return QueueOverview.from_row(await self._call("overview"))

    async def register(self, worker: str, info: Mapping[str, Any]) -> Registered:
        """Record a worker's heartbeat, and learn what is asked of it."""
        return Registered.from_row(await self._call("register", worker, msgpack.packb(dict(info))))

    async def unregister(self, worker: str) -> None:
        """Remove a worker's heartbeat, and the wish to drain it: it has ended in order."""
        await self._read(self._redis.hdel(self.keys.workers, worker))
        await self._read(self._redis.delete(self.keys.drain(worker)))

    async def drain(self, worker: str, *, stands_ms: int = DRAIN_MARK_MS) -> bool:
        """Ask a worker to drain and end, at its next heartbeat; false if there is no such worker.

        The wish is forgotten after `stands_ms`, so that it cannot meet a later worker of that name.
        """
        return bool(await self._call("drain", worker, stands_ms))

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Return each worker's last heartbeat; `t` in it is the server's time in ms.

        A heartbeat that is none, from whoever wrote it, counts as one that tells nothing.
        """
        known = await self._read(self._redis.hgetall(self.keys.workers))
        return {text(name): _report(info) for name, info in known.items()}

    async def sweep(self, *, gone_ms: int, limit: int = 100) -> Swept:
        """Forget workers without a heartbeat for `gone_ms`, and put back jobs that lost a lease."""
        return Swept(*await self._call("sweep", gone_ms, limit))

    async def dead_letters(self, *, after: str = "-", count: int = 100) -> list[DeadLetter]:
        """Return the oldest dead letters after entry `after`, at most `count`."""
        letters: list[DeadLetter] = []

        def read(start: str, most: int) -> Awaitable[Any]:
            left = min(most, count - len(letters))
            return self._read(self._redis.xrange(self.keys.dead, min=start, count=left))

        async for page in read_pages(read, after=after):
            letters += [DeadLetter.from_fields(entry.decode(), fields) for entry, fields in page]
            if len(letters) >= count:
                break
        return letters

    async def dead_letter(self, entry_id: str) -> DeadLetter:
        """Return one dead letter; raise `InvalidRequestError` if there is none of this id."""
        _check_entry_id(entry_id)
        rows = await self._read(self._redis.xrange(self.keys.dead, min=entry_id, max=entry_id))
        if not rows:
            raise InvalidRequestError(f"there is no dead letter {entry_id}", field="entry_id")
        return DeadLetter.from_fields(entry_id, rows[0][1])

    async def drop_dead_letter(self, entry_id: str) -> bool:
        """Remove a dead letter; false if there is none of this id."""
        _check_entry_id(entry_id)
        return bool(await self._read(self._redis.xdel(self.keys.dead, entry_id)))

    async def redrive(self, entry_id: str, *, job_id: str | None = None) -> str:
        """Submit a crashed job anew and return its new id; its dead letter is removed.

        A job id is never used twice: the old one keeps its terminal error. Called again after a
        lost reply with the same new `job_id`, it finds what it did. Raises `InvalidRequestError` if
        there is no such dead letter, or it is an undecodable one.
        """
        new_id = job_id or new_job_id(self.keys.partition)
        self._check_partition(new_id)
        try:
            letter = await self.dead_letter(entry_id)
        except InvalidRequestError:
            if job_id is not None and await self.status(job_id) is not None:
                return job_id
            raise
        if not letter.can_be_redriven:
            raise InvalidRequestError("an undecodable job cannot be redriven", field="entry_id")
        job = replace(Job.decode(letter.payload), id=new_id)
        digest = _digest(job)
        cost = _cost(letter.prompt_tokens, letter.budget)
        status = await self._call("redrive", entry_id, job.id, job.encode(), digest, cost)
        if status == b"unknown":
            raise InvalidRequestError(f"there is no dead letter {entry_id}", field="entry_id")
        return new_id

    def _check_partition(self, job_id: str) -> None:
        if partition_of(job_id) != self.keys.partition:
            raise InvalidRequestError(
                f"{job_id} does not belong to partition {self.keys.partition}", field="job_id"
            )


def _report(info: bytes) -> dict[str, Any]:
    try:
        return unpack(info, MAX_REPORT_BYTES)
    except DecodeError:
        return {}


def _digest(job: Job) -> str:
    return content_digest(
        job.prompt,
        job.params,
        job.model,
        job.metadata,
        task=job.task,
        return_prompt_token_ids=job.return_prompt_token_ids,
    )


def _cost(prompt_tokens: int, budget: int | None) -> int:
    if budget is None:
        return UNBOUNDED_COST
    return min(prompt_tokens + budget, UNBOUNDED_COST)


def _check_retention(retention_ms: int) -> None:
    check_wait("retention", retention_ms, 1, MAX_RETENTION_MS)


def _check_entry_id(entry_id: str) -> None:
    if not re.fullmatch(r"\d{1,20}-\d{1,20}", entry_id):
        raise InvalidRequestError(f"{entry_id!r} is not a stream id", field="entry_id")


def _or_empty(value: int | None) -> int | str:
    return "" if value is None else value
