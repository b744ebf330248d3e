"""The state of webhook deliveries in Redis: due, taken, delivered, dead, and a log of attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from inferq.producer.server import RedisServer
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import TaskKeys
from inferq.protocol.script_call import call_script, read_script
from inferq.protocol.trace_context import TraceContext, trace_to_wire
from inferq.protocol.wire import number, text

_SCRIPTS: Final = "inferq.producer.tasks.lua"
#: How long, in ms, a delivery that was made is remembered, so that it is not made again.
KEEP_DELIVERED_MS: Final = 3 * 86_400_000
#: How long, in ms, a dead delivery can be driven again.
KEEP_DEAD_MS: Final = 30 * 86_400_000
#: Dead deliveries kept; more push out the oldest.
MAX_DEAD: Final = 10_000
#: Attempts that the log holds, about.
MAX_LOG: Final = 10_000


@dataclass(frozen=True, slots=True)
class NewDelivery:
    """What is to be delivered; the id is the same at every try."""

    delivery_id: str
    job_id: str
    event: str
    url: str
    secret: str
    body: bytes
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class TakenDelivery:
    """A delivery that is this process's for the time of a lease; attempts count from 1."""

    delivery_id: str
    attempt: int
    url: str
    secret: str
    body: bytes
    job_id: str = ""
    trace: TraceContext | None = None

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Self:
        """Build from the script's reply."""
        id_, attempt, url, secret, body, job, parent, state = row
        trace = TraceContext.read(text(parent), text(state))
        return cls(id_.decode(), attempt, url.decode(), secret.decode(), body, text(job), trace)

    @property
    def names(self) -> dict[str, str]:
        """What log lines about it name the job by."""
        trace = {} if self.trace is None else {"trace_id": self.trace.trace_id}
        return {"job_id": self.job_id, **trace}


@dataclass(frozen=True, slots=True)
class DeadDelivery:
    """A delivery that was given up, and why the last attempt failed."""

    delivery_id: str
    job_id: str
    event: str
    url: str
    attempts: int
    reason: str
    time_ms: int

    FIELDS = ("job", "event", "url", "attempts", "reason", "updated")

    @classmethod
    def from_values(cls, delivery_id: str, values: Sequence[bytes | None]) -> Self:
        """Build from the values of `FIELDS`."""
        job, event, url, attempts, reason, updated = values
        return cls(
            delivery_id=delivery_id,
            job_id=text(job),
            event=text(event),
            url=text(url),
            attempts=number(attempts),
            reason=text(reason),
            time_ms=number(updated),
        )


@dataclass(frozen=True, slots=True)
class LoggedAttempt:
    """One attempt as the log knows it; `status` 0 where there was no answer."""

    time_ms: int
    delivery_id: str
    attempt: int
    outcome: str
    reason: str
    status: int
    took_ms: int
    host: str

    @classmethod
    def from_entry(cls, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Self:
        """Build from an entry of the log."""
        return cls(
            time_ms=int(entry_id.split(b"-")[0]),
            delivery_id=text(fields.get(b"id")),
            attempt=number(fields.get(b"attempt")),
            outcome=text(fields.get(b"outcome")),
            reason=text(fields.get(b"reason")),
            status=number(fields.get(b"status")),
            took_ms=number(fields.get(b"ms")),
            host=text(fields.get(b"host")),
        )


class DeliveryStore:
    """The deliveries of one queue; all times are the server's, all durations in ms.

    Every method raises `ServerLost` when the server cannot be reached or refuses us.
    """

    def __init__(self, server: RedisServer, queue: str) -> None:
        self._server = server
        self._keys = TaskKeys(queue)

    async def accept(self, new: NewDelivery) -> bool:
        """Record a delivery, which is due at once; false if it was known already."""
        keys = (self._keys.delivery(new.delivery_id), self._keys.due)
        arguments = (new.delivery_id, new.job_id, new.event, new.url, new.secret, new.body)
        trace = trace_to_wire(new.trace)
        traced = (trace.get("tp", ""), trace.get("ts", ""))
        return bool(await self._call("accept", keys, *arguments, *traced))

    async def take(self, *, most: int, lease_ms: int) -> list[TakenDelivery]:
        """Take deliveries that are due; those not reported within the lease are due again."""
        rows = await self._call("take", (self._keys.due,), self._keys.deliveries, most, lease_ms)
        return [TakenDelivery.from_row(row) for row in rows]

    async def report(
        self,
        taken: TakenDelivery,
        outcome: str,
        *,
        next_ms: int = 0,
        reason: str = "",
        status: int = 0,
        took_ms: int = 0,
        host: str = "",
    ) -> bool:
        """Say what became of an attempt; false if it was taken again meanwhile, or has ended.

        `outcome` is one of `delivered`, `retry`, `dead` and `postponed`, see `report.lua`.
        """
        keys = self._keys
        return bool(
            await self._call(
                "report",
                (keys.delivery(taken.delivery_id), keys.due, keys.dead, keys.log),
                taken.delivery_id,
                taken.attempt,
                outcome,
                next_ms,
                reason,
                status,
                took_ms,
                host,
                KEEP_DELIVERED_MS,
                KEEP_DEAD_MS,
                MAX_DEAD,
                MAX_LOG,
                keys.deliveries,
            )
        )

    async def pace(self, host: str, *, interval_ms: float, early_ms: float) -> int:
        """Return 0 if a host may be called now, which counts as a call; else the ms to wait."""
        keys = (self._keys.host(host),)
        return int(await self._call("pace", keys, interval_ms, early_ms, 0))

    async def pause(self, host: str, *, pause_ms: int, early_ms: float) -> None:
        """Leave a host alone for a while, as it asks for."""
        await self._call("pace", (self._keys.host(host),), 0, early_ms, max(1, pause_ms))

    async def count_due(self) -> int:
        """Return how many deliveries are due now."""

        async def count(redis: Any) -> int:
            seconds, microseconds = await redis.time()
            now = seconds * 1000 + microseconds // 1000
            return int(await redis.zcount(self._keys.due, "-inf", now))

        return await self._server.call(lambda: count(self._server.commands))

    async def count_dead(self) -> int:
        """Return how many deliveries were given up and are kept."""
        return int(await self._server.call(lambda: self._server.commands.zcard(self._keys.dead)))

    async def dead(self, *, most: int = MAX_DEAD) -> list[DeadDelivery]:
        """Return the deliveries that were given up last, newest first."""

        async def read(redis: Any) -> list[DeadDelivery]:
            names = [text(id_) for id_ in await redis.zrevrange(self._keys.dead, 0, most - 1)]
            async with redis.pipeline(transaction=False) as pipeline:
                for name in names:
                    pipeline.hmget(self._keys.delivery(name), DeadDelivery.FIELDS)
                rows = await pipeline.execute()
            return [
                DeadDelivery.from_values(name, values)
                for name, values in zip(names, rows, strict=True)
                if values[0] is not None
            ]

        return await self._server.call(lambda: read(self._server.commands))

    async def redrive(self, delivery_id: str) -> None:
        """Make a dead delivery due again; raise `InvalidRequestError` if it is not dead."""
        keys = (self._keys.delivery(delivery_id), self._keys.due, self._keys.dead)
        if not await self._call("redrive", keys, delivery_id):
            raise InvalidRequestError(
                f"there is no dead delivery {delivery_id!r}", field="delivery_id"
            )

    async def log(self, *, most: int) -> list[LoggedAttempt]:
        """Return the last attempts, newest first."""
        rows: Any = await self._server.call(
            lambda: self._server.commands.xrevrange(self._keys.log, count=most)
        )
        return [LoggedAttempt.from_entry(entry, fields) for entry, fields in rows]

    async def claim_interval(
        self, duty: str, interval_ms: int, *, for_all_queues: bool = False
    ) -> bool:
        """Whether a duty is this process's for this interval: true once, whoever asks.

        One that is `for_all_queues` is claimed for all of them together.
        """
        keys = self._keys
        key = keys.shared_interval(duty) if for_all_queues else keys.interval(duty)
        made = await self._server.call(
            lambda: self._server.commands.set(key, 1, nx=True, px=interval_ms)
        )
        return bool(made)

    async def _call(self, name: str, keys: Sequence[str], *arguments: str | bytes | float) -> Any:
        return await self._server.call(
            lambda: call_script(self._server.commands, read_script(_SCRIPTS, name), keys, arguments)
        )
