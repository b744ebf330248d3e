"""What looks after a queue beside its producers and workers: upkeep, and the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from inferq.protocol.errors import DecodeError
from inferq.protocol.messages import Event
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.webhooks import OutboxEntry

#: Jobs that one recount looks at; a longer queue is left as it is.
RECOUNT_LIMIT: Final = 1_000


class UpkeepScripts(QueueScripts):
    """The operations of `QueueScripts`, and those of maintenance."""

    async def promote(self, *, retention_ms: int) -> int:
        """Move delayed jobs that are due into their lanes; return how many were looked at.

        One call moves some of them; call again for more, until it returns 0.
        """
        return int(await self._call("promote", retention_ms))

    async def recount(self, *, limit: int = RECOUNT_LIMIT) -> int | None:
        """Count anew what `load` counts; return how many counters were wrong.

        None: there are more than `limit` jobs, or their payloads are longer than 64 MiB together,
        and nothing was counted.
        """
        counted, wrong = await self._call("recount", limit)
        return int(wrong) if counted else None

    async def trim_dead_letters(self, *, age_ms: int) -> int:
        """Remove dead letters older than `age_ms`; return how many."""
        seconds, microseconds = await self._read(self._redis.time())
        oldest = max(0, seconds * 1000 + microseconds // 1000 - age_ms)
        trimmed = self._redis.xtrim(self.keys.dead, minid=f"{oldest}-0", approximate=False)
        return int(await self._read(trimmed))

    async def outbox(self, *, count: int) -> list[OutboxEntry]:
        """Return the oldest ends that no one has moved on."""
        rows = await self._read(self._redis.xrange(self.keys.outbox, count=count))
        return [OutboxEntry.from_fields(entry.decode(), fields) for entry, fields in rows]

    async def outbox_length(self) -> int:
        """Return how many ends no one has moved on."""
        return int(await self._read(self._redis.xlen(self.keys.outbox)))

    async def remove_from_outbox(self, entry_ids: Sequence[str]) -> None:
        """Take ends out that have been moved on; a second time does nothing."""
        if entry_ids:
            await self._read(self._redis.xdel(self.keys.outbox, *entry_ids))

    async def last_event(self, job_id: str) -> Event | None:
        """Return a job's last event; None where it is gone, or cannot be read."""
        self._check_partition(job_id)
        rows = await self._read(self._redis.xrevrange(self.keys.out(job_id), count=1))
        try:
            return Event.decode(rows[0][1].get(b"e", b"")) if rows else None
        except DecodeError:
            return None
