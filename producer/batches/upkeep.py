"""The records of files and batches as who cleans up behind them needs them, many at once."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from redis.asyncio import Redis

from inferq.producer.batches.postponing import now_ms, postpone
from inferq.producer.batches.records import Status
from inferq.producer.batches.store import BatchStore
from inferq.protocol.wire import text

#: Records asked for in one go.
_ASKED_AT_ONCE: Final = 100


class UpkeepStore(BatchStore):
    """The records, and what has become of many of them; see `BatchStore`."""

    async def expired(self, *, most: int) -> list[str]:
        """Return ids of files and batches whose time is over."""

        async def read(redis: Redis) -> list[bytes]:
            now = await now_ms(redis)
            found: Any = await redis.zrangebyscore(
                self._keys.expiring, "-inf", now, start=0, num=most
            )
            return list(found)

        return [text(each) for each in await self._run(read)]

    async def forget_batch(self, batch_id: str) -> None:
        """Remove the record of a batch that has ended."""
        owner = await self._owner(self._keys.batch(batch_id))

        async def remove(redis: Redis) -> None:
            await redis.zrem(self._keys.batches(owner), batch_id)
            await redis.delete(self._keys.batch(batch_id), self._keys.parts(batch_id))
            await redis.zrem(self._keys.expiring, batch_id)

        await self._run(remove)

    async def keep_longer(self, ids: Sequence[str], *, seconds: int) -> None:
        """Look at what has expired, but cannot go yet, again after so many seconds."""
        ms = seconds * 1000
        await self._run(partial(postpone, key=self._keys.expiring, ids=ids, ms=ms))

    async def known_files(self, file_ids: Sequence[str]) -> set[str]:
        """Return those of the ids that are files with a record."""

        async def read(ids: Sequence[str], redis: Redis) -> list[Any]:
            async with redis.pipeline(transaction=False) as pipeline:
                for file_id in ids:
                    pipeline.exists(self._keys.file(file_id))
                return list(await pipeline.execute())

        rows = await self._in_chunks(read, file_ids)
        return {file_id for file_id, exists in zip(file_ids, rows, strict=True) if exists}

    async def have_ended(self, batch_ids: Sequence[str]) -> dict[str, bool]:
        """Return whether batches have ended, by their ids; those without a record are left out.

        One whose record cannot be read has not.
        """

        async def read(ids: Sequence[str], redis: Redis) -> list[Any]:
            async with redis.pipeline(transaction=False) as pipeline:
                for batch_id in ids:
                    pipeline.exists(self._keys.batch(batch_id))
                    pipeline.hget(self._keys.batch(batch_id), "status")
                replies = await pipeline.execute()
            return list(zip(replies[::2], replies[1::2], strict=True))

        final = {status.value for status in Status if status.is_final}
        rows = zip(batch_ids, await self._in_chunks(read, batch_ids), strict=True)
        return {batch_id: text(status) in final for batch_id, (exists, status) in rows if exists}

    async def server_id(self) -> str:
        """Return this server's identity, made at random when it is first asked for."""
        drawn = secrets.token_hex(16)

        async def read(redis: Any) -> bytes | None:
            await redis.set(self._keys.server, drawn, nx=True)
            found: bytes | None = await redis.get(self._keys.server)
            return found

        return text(await self._run(read))

    async def _in_chunks(
        self, read: Callable[[Sequence[str], Redis], Any], ids: Sequence[str]
    ) -> list[Any]:
        rows: list[Any] = []
        for first in range(0, len(ids), _ASKED_AT_ONCE):
            chunk = ids[first : first + _ASKED_AT_ONCE]
            rows += await self._run(partial(read, chunk))
        return rows
