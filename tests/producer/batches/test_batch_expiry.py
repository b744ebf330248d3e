"""What is removed when its time is over, and what a crash left."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from inferq.producer.batches.expiry import LEFTOVER_S, remove_expired, remove_leftovers
from inferq.producer.batches.records import BatchRecord, FileRecord, new_batch_id, new_file_id
from inferq.producer.batches.storage import FileStorage
from inferq.producer.batches.store import BatchStore
from inferq.protocol.keys import BatchKeys


async def put(storage: FileStorage, name: str) -> None:
    async with storage.writer(name) as writer:
        await writer.write(b"x")
        await writer.commit()


def make_file(expires_at: int | None) -> FileRecord:
    return FileRecord(
        id=new_file_id(),
        bytes=1,
        created_at=1,
        filename="x",
        purpose="batch",
        expires_at=expires_at,
    )


async def test_files_go_when_their_time_is_over(store: BatchStore, storage: FileStorage) -> None:
    past, future = int(time.time()) - 1, int(time.time()) + 3600
    files = {name: make_file(at) for name, at in (("old", past), ("new", future), ("ever", None))}
    for file in files.values():
        await put(storage, file.id)
        await store.create_file(file)
    assert await remove_expired(store, storage) >= 1
    for name, file in files.items():
        assert (await store.file(file.id) is None) == (name == "old")
        assert await storage.exists(file.id) == (name != "old")


async def test_a_file_that_a_batch_reads_stays_and_an_ended_batch_goes(
    store: BatchStore, storage: FileStorage, make_batch: Any, run_turn: Any, line_of: Any,
    valkey_client: Redis,
) -> None:  # fmt: skip
    batch: BatchRecord = await make_batch([line_of("a")], seconds=0)
    keys = BatchKeys()
    await valkey_client.zadd(keys.expiring, {batch.input_file_id: 1})
    await remove_expired(store, storage)
    assert await storage.exists(batch.input_file_id)
    await run_turn()
    done = await store.batch(batch.id)
    assert done is not None
    assert done.error_file_id is not None
    await valkey_client.zadd(
        keys.expiring, dict.fromkeys((batch.input_file_id, batch.id, done.error_file_id), 1)
    )
    await remove_expired(store, storage)
    assert await store.batch(batch.id) is None
    assert batch.id not in [each.id for each in (await store.batches(None, limit=9999)).records]
    assert await storage.listing() == []


async def test_what_a_crash_left_goes_after_a_day(
    store: BatchStore, storage: FileStorage, storage_url: str, make_batch: Any, line_of: Any
) -> None:
    known, unknown, fresh = make_file(None), new_file_id(), new_file_id()
    unfinished = f"{new_file_id()}.0123.tmp"
    batch: BatchRecord = await make_batch([line_of("a")])
    gone = new_batch_id()
    others = ["notes.txt", "batch_of_mine"]
    for name in (known.id, unknown, fresh, unfinished, *others):
        await put(storage, name)
    for folder in (batch.id, gone):
        await put(storage, f"{folder}/output-000001-1.jsonl")
    await store.create_file(known)
    old = time.time() - LEFTOVER_S - 60
    for name in (known.id, unknown, unfinished, batch.input_file_id, *others):
        os.utime(Path(storage_url) / name, (old, old))
    assert await remove_leftovers(store, storage) == 3
    left = {each.name for each in await storage.listing()}
    assert left == {known.id, fresh, batch.id, batch.input_file_id, *others}
