"""What is removed when its time is over, and what a crash left."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient
from inferq.producer.batches.expiry import (
    LEFTOVER_S,
    SERVER_FILE,
    ForeignStorage,
    remove_expired,
    remove_leftovers,
)
from inferq.producer.batches.records import BatchRecord, FileRecord, new_batch_id, new_file_id
from inferq.producer.batches.storage import FileStorage
from inferq.producer.batches.upkeep import UpkeepStore
from inferq.protocol.keys import BatchKeys

#: Generous: the machine may be busy.
TIMEOUT_S = 60


@pytest.fixture
def store(client: AsyncClient) -> UpkeepStore:
    return UpkeepStore(client)


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


async def test_files_go_when_their_time_is_over(store: UpkeepStore, storage: FileStorage) -> None:
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
    store: UpkeepStore, storage: FileStorage, make_batch: Any, run_turn: Any, line_of: Any,
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
    store: UpkeepStore, storage: FileStorage, storage_url: str, make_batch: Any, line_of: Any
) -> None:
    known, unknown, fresh = make_file(None), new_file_id(), new_file_id()
    unfinished = f"{new_file_id()}.0123.tmp"
    batch: BatchRecord = await make_batch([line_of("a")])
    gone, young = new_batch_id(), new_batch_id()
    others = ["notes.txt", "batch_of_mine"]
    for name in (known.id, unknown, fresh, unfinished, *others):
        await put(storage, name)
    parts = {each: f"{each}/output-000001-1.jsonl" for each in (batch.id, gone, young)}
    for name in parts.values():
        await put(storage, name)
    await store.create_file(known)
    assert await remove_leftovers(store, storage) == 0
    old = time.time() - LEFTOVER_S - 60
    for name in (
        *(known.id, unknown, unfinished, batch.input_file_id, parts[batch.id], parts[gone]),
        *others,
    ):
        os.utime(Path(storage_url) / name, (old, old))
    assert await remove_leftovers(store, storage) == 3
    left = {each.name for each in await storage.listing()}
    assert left == {
        *(known.id, fresh, batch.id, young, batch.input_file_id, SERVER_FILE),
        *others,
    }


async def test_the_folder_of_a_batch_that_has_ended_goes_at_once(
    store: UpkeepStore, any_storage: FileStorage, make_batch: Any, run_turn: Any, line_of: Any
) -> None:
    batch: BatchRecord = await make_batch([line_of("a")], seconds=0, storage=any_storage)
    await run_turn(storage=any_storage)
    await put(any_storage, f"{batch.id}/output-000001-1.jsonl")
    young = new_batch_id()
    await put(any_storage, f"{young}/output-000001-1.jsonl")
    await remove_leftovers(store, any_storage)
    assert await remove_leftovers(store, any_storage) == 1
    left = {each.name for each in await any_storage.listing() if each.changed_at is None}
    assert left == {young}


async def test_what_another_server_keeps_in_the_same_storage_is_left_alone(
    store: UpkeepStore, storage: FileStorage, storage_url: str, own_server: EmbeddedServer,
    make_batch: Any, line_of: Any, queue: str,
) -> None:  # fmt: skip
    batch: BatchRecord = await make_batch([line_of("a")])
    part = f"{batch.id}/output-000001-1.jsonl"
    await put(storage, part)
    await remove_leftovers(store, storage)
    old = time.time() - LEFTOVER_S - 60
    for name in (part, batch.input_file_id):
        os.utime(Path(storage_url) / name, (old, old))
    before = {each.name for each in await storage.listing()}
    async with AsyncClient(own_server.url, queue) as client:
        stranger = UpkeepStore(client)
        with pytest.raises(ForeignStorage, match="another Redis server") as caught:
            await remove_leftovers(stranger, storage)
        assert storage.name in str(caught.value)
        assert {each.name for each in await storage.listing()} == before
        assert await storage.exists(part)
        # as the message says, where the other one is gone for good
        await storage.delete(SERVER_FILE)
        assert await remove_leftovers(stranger, storage) == 0
        assert await remove_leftovers(stranger, storage) == 2
    with pytest.raises(ForeignStorage):
        await remove_leftovers(store, storage)


@pytest.mark.parametrize("member", [f"file-{'0' * 32}", f"batch_{'0' * 32}", "../no id"])
async def test_what_expires_without_a_record_is_looked_at_once(
    store: UpkeepStore, storage: FileStorage, valkey_client: Redis, member: str
) -> None:
    await put(storage, "notes.txt")
    expiring = BatchKeys().expiring
    await valkey_client.zadd(expiring, {member: 1})
    async with asyncio.timeout(TIMEOUT_S):
        await remove_expired(store, storage)
    assert await valkey_client.zscore(expiring, member) is None


async def test_an_unreadable_record_expires_like_any_other(
    store: UpkeepStore, storage: FileStorage, make_batch: Any, line_of: Any, valkey_client: Redis
) -> None:
    batch: BatchRecord = await make_batch([line_of("a")], owner="alice")
    file = make_file(None)
    await put(storage, file.id)
    await store.create_file(file)
    keys = BatchKeys()
    await valkey_client.hset(keys.batch(batch.id), "terms", "[]")
    await valkey_client.hset(keys.file(file.id), "bytes", "many")
    await valkey_client.zadd(keys.expiring, {batch.id: 1, file.id: 1})
    await remove_expired(store, storage)
    assert not await valkey_client.exists(keys.batch(batch.id), keys.file(file.id))
    assert await valkey_client.zscore(keys.batches("alice"), batch.id) is None
    assert not await storage.exists(file.id)


async def test_a_process_that_is_to_end_leaves_the_rest_for_later(
    store: UpkeepStore, storage: FileStorage, valkey_client: Redis
) -> None:
    file = make_file(1)
    await store.create_file(file)
    assert await remove_expired(store, storage, lambda: True) == 0
    assert await store.file(file.id) == file


async def test_cleaning_asks_the_server_for_many_records_at_once(
    store: UpkeepStore, storage: FileStorage, monkeypatch: pytest.MonkeyPatch, valkey_client: Redis,
    storage_url: str,
) -> None:  # fmt: skip
    files = [make_file(None) for _ in range(20)]
    for file in files:
        await put(storage, file.id)
        await store.create_file(file)
        os.utime(Path(storage_url) / file.id, (1, 1))
    await remove_leftovers(store, storage)
    calls = 0
    run = AsyncClient.run

    async def count(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return await run(*arguments, **options)

    monkeypatch.setattr(AsyncClient, "run", count)
    assert await remove_leftovers(store, storage) == 0
    assert calls < 5
