"""Files and batches as Redis knows them; every change is atomic, so that no two contradict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Literal, TypeVar

import structlog
from redis.asyncio import Redis

from inferq.producer.async_client import AsyncClient
from inferq.producer.batches.postponing import postpone
from inferq.producer.batches.records import (
    BatchRecord,
    Counts,
    FileFault,
    FileRecord,
    Status,
    encode_counts,
    encode_faults,
)
from inferq.protocol.errors import DecodeError, InferqError, InvalidRequestError
from inferq.protocol.keys import BatchKeys
from inferq.protocol.script_call import call_script, read_script
from inferq.protocol.wire import number, text

logger = structlog.get_logger("inferq.batches")

_SCRIPTS: Final = "inferq.producer.batches.lua"
#: Records read at once while looking for those of one purpose.
_READ_AT_ONCE: Final = 100
#: Milliseconds until a batch is taken again whose record could not be read: maybe by a newer us.
_UNREADABLE_AGAIN_MS: Final = 60_000

Order = Literal["asc", "desc"]
R = TypeVar("R", FileRecord, BatchRecord)


class BatchLost(InferqError):
    """The batch is another process's now, or has ended: this one must write no more."""


@dataclass(frozen=True, slots=True)
class Page(Generic[R]):
    """Records in the order asked for, and whether more come after the last."""

    records: list[R]
    has_more: bool


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """A batch that is this process's for the time of a lease; a higher token takes it away."""

    record: BatchRecord
    token: int


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a batch's earlier runs left: whether its file was surveyed, and how far they came.

    `checkpoint`, `repeated` and `parts` are as they were written; None and nothing at first.
    `reached` is the last line that may have been submitted.
    """

    is_surveyed: bool
    reached: int
    checkpoint: bytes | None
    repeated: bytes
    parts: list[bytes]
    goal: Status | None


class BatchStore:
    """The records of files and batches; `client` is one of any queue on their server.

    Every method raises `ServerLost` when the server cannot be reached or refuses us. A record that
    cannot be read is a `DecodeError` for who asks for it, and left out, loudly, where there are
    others beside it.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._keys = BatchKeys()

    async def create_file(self, record: FileRecord) -> None:
        """Record a file that is whole in the storage; a second time changes nothing."""
        keys = self._keys
        expires_ms = "" if record.expires_at is None else record.expires_at * 1000
        await self._call(
            "create_file",
            (keys.file(record.id), keys.files(record.owner), keys.expiring),
            *(record.id, expires_ms, *_flat(record.to_hash())),
        )

    async def file(self, file_id: str) -> FileRecord | None:
        """Return a file's record, if there is one."""
        return FileRecord.from_hash(await self._hash(self._keys.file(file_id)))

    async def files(
        self,
        owner: str | None,
        *,
        after: str | None = None,
        limit: int = 20,
        order: Order = "desc",
        purpose: str | None = None,
    ) -> Page[FileRecord]:
        """Return an owner's files, newest first or last, those that come `after` one of them.

        Raises `InvalidRequestError` if `after` is none of them.
        """
        return await self._page(
            self._keys.files(owner),
            lambda file_id: self._keys.file(file_id),
            FileRecord.from_hash,
            *(after, limit, order),
            lambda record: purpose is None or record.purpose == purpose,
        )

    async def delete_file(self, file_id: str) -> bool:
        """Forget a file, whose bytes are the caller's to remove; false if it is not known.

        Raises `InvalidRequestError` while a batch that has not ended reads it.
        """
        keys = self._keys
        owner = await self._owner(keys.file(file_id))
        reply = await self._call(
            "delete_file", (keys.file(file_id), keys.files(owner), keys.expiring), file_id
        )
        if reply < 0:
            raise InvalidRequestError(
                f"{file_id} is the input of a batch that has not ended", field="file_id"
            )
        return bool(reply)

    async def create_batch(self, record: BatchRecord) -> None:
        """Record a batch, which is due at once; a second time changes nothing.

        Raises `InvalidRequestError` if its input file is not known.
        """
        keys = self._keys
        made = await self._call(
            "create_batch",
            (
                keys.batch(record.id),
                keys.batches(record.owner),
                keys.file(record.input_file_id),
                keys.due(record.terms.queues[0]),
            ),
            *(record.id, *_flat(record.to_hash())),
        )
        if not made:
            raise InvalidRequestError(
                f"there is no file {record.input_file_id!r}", field="input_file_id"
            )

    async def batch(self, batch_id: str) -> BatchRecord | None:
        """Return a batch's record, if there is one."""
        return BatchRecord.from_hash(await self._hash(self._keys.batch(batch_id)))

    async def batches(
        self, owner: str | None, *, after: str | None = None, limit: int = 20
    ) -> Page[BatchRecord]:
        """Return an owner's batches, newest first, those that come `after` one of them.

        Raises `InvalidRequestError` if `after` is none of them.
        """
        return await self._page(
            self._keys.batches(owner),
            lambda batch_id: self._keys.batch(batch_id),
            BatchRecord.from_hash,
            *(after, limit, "desc"),
            lambda _: True,
        )

    async def request_cancel(self, batch_id: str) -> BatchRecord | None:
        """Ask for the end of a batch and return its record; None if there is no such batch.

        Raises `InvalidRequestError` if it has ended, or is putting its files together.
        """
        before = text(await self._call("cancel", (self._keys.batch(batch_id),)))
        if before not in ("", "validating", "in_progress", "cancelling"):
            raise InvalidRequestError(
                f"a batch that is {before} cannot be cancelled", field="batch_id"
            )
        return await self.batch(batch_id) if before else None

    async def take(self, queue: str, *, most: int, lease_ms: int) -> list[TakenBatch]:
        """Take batches of a queue that nobody runs; those not written within the lease are due.

        One whose record cannot be read is let be for a minute.
        """
        due = self._keys.due(queue)
        rows = await self._call("take", (due,), BatchKeys.BATCHES, most, lease_ms)
        taken, unreadable = [], []
        for member, token in rows:
            record = None
            if token:
                row = await self._hash(self._keys.batch(text(member)))
                record = _readable(BatchRecord.from_hash, row)
            if record is None:
                logger.error("batch not taken, its record cannot be read", batch=text(member))
                unreadable.append(member)
            else:
                taken.append(TakenBatch(record, token))
        if unreadable:
            await self._run(partial(postpone, key=due, ids=unreadable, ms=_UNREADABLE_AGAIN_MS))
        return taken

    async def resumption(self, batch_id: str) -> Resumption:
        """Return what earlier runs of a batch left."""

        async def read(redis: Any) -> tuple[list[Any], list[bytes]]:
            names = ("surveyed", "checkpoint", "repeated", "goal", "reached")
            fields = await redis.hmget(self._keys.batch(batch_id), names)
            return fields, await redis.lrange(self._keys.parts(batch_id), 0, -1)

        (surveyed, checkpoint, repeated, goal, reached), parts = await self._run(read)
        return Resumption(
            is_surveyed=surveyed is not None,
            reached=number(reached),
            checkpoint=checkpoint,
            repeated=repeated or b"",
            parts=parts,
            goal=None if goal is None else Status(text(goal)),
        )

    async def write(
        self,
        taken: TakenBatch,
        fields: dict[str, str | bytes | int],
        *,
        lease_ms: int,
        status: Status | None = None,
        part: tuple[int, str] | None = None,
    ) -> Status:
        """Write fields of a batch that we run, renew its lease, and return its status.

        `part` is added to its parts, with the number of those before it. A batch that is being
        cancelled keeps that status. Raises `BatchLost`.
        """
        keys, batch_id = self._keys, taken.record.id
        before, added = part or (0, "")
        reply = await self._call(
            "write",
            (keys.batch(batch_id), keys.due(taken.record.terms.queues[0]), keys.parts(batch_id)),
            batch_id,
            taken.token,
            lease_ms,
            "" if status is None else status.value,
            before,
            added,
            *_flat(fields),
        )
        if not reply:
            raise BatchLost(f"batch {batch_id} is another process's now")
        return Status(text(reply))

    async def finish(
        self,
        taken: TakenBatch,
        status: Status,
        *,
        record_expires_at: int,
        counts: Counts | None = None,
        faults: Sequence[FileFault] = (),
        output: FileRecord | None = None,
        errors: FileRecord | None = None,
    ) -> None:
        """End a batch that we run, with its files; raise `BatchLost`."""
        keys, record = self._keys, taken.record
        fields: dict[str, str | bytes | int] = {}
        if counts is not None:
            fields["counts"] = encode_counts(counts)
        if faults:
            fields["errors"] = encode_faults(faults)
        hashes = [[] if made is None else _flat(made.to_hash()) for made in (output, errors)]
        expires_at = next((f.expires_at for f in (output, errors) if f is not None), None)
        done = await self._call(
            "finish",
            (
                keys.batch(record.id),
                keys.due(record.terms.queues[0]),
                keys.parts(record.id),
                keys.file(record.input_file_id),
                keys.files(record.owner),
                keys.expiring,
                keys.file("" if output is None else output.id),
                keys.file("" if errors is None else errors.id),
            ),
            record.id,
            taken.token,
            status.value,
            record_expires_at * 1000,
            (expires_at or 0) * 1000,
            "" if output is None else output.id,
            "" if errors is None else errors.id,
            2 * len(fields),
            *map(len, hashes),
            *_flat(fields),
            *(value for flat in hashes for value in flat),
        )
        if not done and not await self._is_finished_by(taken, status):
            raise BatchLost(f"batch {record.id} is another process's now")

    async def _is_finished_by(self, taken: TakenBatch, status: Status) -> bool:
        """Whether a lost reply was that of success."""
        kept = await self._hash(self._keys.batch(taken.record.id))
        token = kept.get(b"token")
        return token == str(taken.token).encode() and text(kept.get(b"status")) == status.value

    async def _page(
        self,
        index: str,
        key_of: Callable[[str], str],
        build: Callable[[dict[bytes, bytes]], R | None],
        after: str | None,
        limit: int,
        order: Order,
        wanted: Callable[[R], bool],
    ) -> Page[R]:
        first = 0
        if after is not None:
            place = await self._run(lambda redis: _rank(redis, index, after, order))
            if place is None:
                raise InvalidRequestError(
                    f"there is no {after[:80]!r} to go on after", field="after"
                )
            first = place + 1
        found: list[R] = []
        while len(found) <= limit:
            read = partial(_rows, index=index, first=first, order=order, key_of=key_of)
            rows = await self._run(read)
            records = [_readable(build, row) for row in rows]
            found += [record for record in records if record is not None and wanted(record)]
            first += _READ_AT_ONCE
            if len(rows) < _READ_AT_ONCE:
                break
        return Page(found[:limit], len(found) > limit)

    async def _owner(self, key: str) -> str | None:
        """Return the owner in a record that may be unreadable otherwise."""

        async def read(redis: Any) -> bytes | None:
            found: bytes | None = await redis.hget(key, "owner")
            return found

        owner: bytes | None = await self._run(read)
        return None if owner is None else text(owner)

    async def _hash(self, key: str) -> dict[bytes, bytes]:
        async def read(redis: Any) -> dict[bytes, bytes]:
            return dict(await redis.hgetall(key))

        found: dict[bytes, bytes] = await self._run(read)
        return found

    async def _run(self, operation: Callable[[Redis], Any]) -> Any:
        return await self._client.run(operation, slot_key=BatchKeys.PREFIX)

    async def _call(self, name: str, keys: Sequence[str], *arguments: str | bytes | int) -> Any:
        return await self._run(
            lambda redis: call_script(redis, read_script(_SCRIPTS, name), keys, arguments)
        )


def _readable(build: Callable[[dict[bytes, bytes]], R | None], row: dict[bytes, bytes]) -> R | None:
    """Return a record; None, and a line in the log, for one that cannot be read."""
    try:
        return build(row)
    except DecodeError as error:
        logger.error("record left out", reason=str(error))
        return None


async def _rank(redis: Any, index: str, member: str, order: Order) -> int | None:
    rank = redis.zrank if order == "asc" else redis.zrevrank
    place: int | None = await rank(index, member)
    return place


async def _rows(
    redis: Any, *, index: str, first: int, order: Order, key_of: Callable[[str], str]
) -> list[dict[bytes, bytes]]:
    read = redis.zrange if order == "asc" else redis.zrevrange
    members = await read(index, first, first + _READ_AT_ONCE - 1)
    async with redis.pipeline(transaction=False) as pipeline:
        for member in members:
            pipeline.hgetall(key_of(text(member)))
        return list(await pipeline.execute())


def _flat(fields: dict[str, str | int] | dict[str, str | bytes | int]) -> list[str | bytes | int]:
    return [each for pair in fields.items() for each in pair]
