"""Files by name, in a folder and in S3: whole or not there."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from inferq.producer.batches import storage as module
from inferq.producer.batches.storage import (
    MAX_THREADS,
    UPLOAD_PART_BYTES,
    FileStorage,
    StorageError,
    StoredFileGone,
)
from inferq.producer.tasks.command import read_settings
from inferq.protocol.errors import InvalidRequestError, MissingExtraError

#: Generous: the machine may be busy.
TIMEOUT_S = 60
#: Few bytes at once, so that a small file takes several reads.
READ_BYTES = 3 * 2**20


async def write(storage: FileStorage, name: str, *pieces: bytes) -> None:
    async with storage.writer(name) as writer:
        for piece in pieces:
            await writer.write(piece)
        assert writer.size == sum(map(len, pieces))
        await writer.commit()


async def fail_writing(storage: FileStorage, data: bytes) -> None:
    async with storage.writer("new") as writer:
        await writer.write(data)
        raise KeyError


def temporary_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


async def read(storage: FileStorage, name: str, offset: int = 0) -> bytes:
    return b"".join([chunk async for chunk in storage.read(name, offset)])


async def test_what_is_written_is_read_from_any_byte_on(
    any_storage: FileStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_BYTES", READ_BYTES)
    whole = os.urandom(UPLOAD_PART_BYTES + 3)
    cut = UPLOAD_PART_BYTES - 1
    await write(any_storage, "file-1", whole[:10], whole[10:cut], whole[cut:])
    assert await any_storage.size("file-1") == len(whole)
    assert await read(any_storage, "file-1") == whole
    assert await read(any_storage, "file-1", READ_BYTES - 1) == whole[READ_BYTES - 1 :]
    assert await read(any_storage, "file-1", len(whole)) == b""
    await write(any_storage, "file-1", b"in its place")
    assert await read(any_storage, "file-1") == b"in its place"
    await write(any_storage, "empty")
    assert await read(any_storage, "empty") == b""


async def test_a_file_is_there_once_it_is_committed(any_storage: FileStorage) -> None:
    async with any_storage.writer("a-folder/part") as writer:
        await writer.write(b"x" * (UPLOAD_PART_BYTES + 1))
        assert not await any_storage.exists("a-folder/part")
        await writer.commit()
        assert await any_storage.exists("a-folder/part")


async def test_nothing_stays_of_what_is_not_committed(
    any_storage: FileStorage, tmp_path: Path
) -> None:
    await write(any_storage, "kept", b"before")
    for size in (3, UPLOAD_PART_BYTES + 1):
        async with any_storage.writer("kept") as writer:
            await writer.write(b"x" * size)
        with pytest.raises(KeyError):
            await fail_writing(any_storage, b"x" * size)
    assert await read(any_storage, "kept") == b"before"
    assert not await any_storage.exists("new")
    assert [each.name for each in await any_storage.listing()] == ["kept"]
    assert not temporary_files(tmp_path)


async def test_nothing_stays_of_a_writer_that_is_cancelled(
    any_storage: FileStorage, tmp_path: Path
) -> None:
    writing = asyncio.Event()

    async def run() -> None:
        async with any_storage.writer("cancelled") as writer:
            writing.set()
            while True:
                await writer.write(b"x" * 2**20)

    task = asyncio.create_task(run())
    await writing.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await any_storage.listing() == []
    assert not temporary_files(tmp_path)


async def test_a_file_that_is_committed_while_nobody_waits_any_more_stays(
    storage: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def wait(descriptor: int) -> None:
        begun.set()
        assert may_go_on.wait(TIMEOUT_S)
        fsync(descriptor)

    aborted: list[Any] = []
    monkeypatch.setattr(os, "fsync", wait)
    monkeypatch.setattr(module._FolderWriter, "abort", lambda writer: aborted.append(writer))
    writing = asyncio.create_task(write(storage, "file-1", b"whole"))
    assert await asyncio.to_thread(begun.wait, TIMEOUT_S)
    writing.cancel()
    await asyncio.sleep(0)
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert await read(storage, "file-1") == b"whole"
    assert not aborted
    assert not temporary_files(tmp_path)


async def test_a_storage_that_hangs_holds_nothing_else_up(storage: FileStorage) -> None:
    others = threads_of_storages()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))  # as few threads as a small machine has
    may_go_on = threading.Event()
    hanging = [
        asyncio.create_task(storage.call(lambda: may_go_on.wait(TIMEOUT_S)))
        for _ in range(2 * MAX_THREADS)
    ]
    try:
        found = await asyncio.wait_for(loop.getaddrinfo("127.0.0.1", 80), TIMEOUT_S / 2)
        assert found
        assert len(threads_of_storages() - others) <= MAX_THREADS
    finally:
        may_go_on.set()
    assert all(await asyncio.gather(*hanging))
    threads = threads_of_storages() - others
    assert threads
    storage.close()
    for thread in threads:
        await asyncio.to_thread(thread.join, TIMEOUT_S)
        assert not thread.is_alive()


def threads_of_storages() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("inferq-storage")}


@pytest.mark.parametrize("size", [1000, 2**20, UPLOAD_PART_BYTES, 3 * UPLOAD_PART_BYTES + 7])
def test_a_writer_holds_no_more_than_the_storage_says(
    s3_storage: FileStorage, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3fs.core import S3File

    def begin(file: Any) -> None:
        file.mpu, file.parts = {"UploadId": "1"}, []

    monkeypatch.setattr(S3File, "_initiate_upload", begin)
    monkeypatch.setattr(S3File, "_call_s3", lambda *_, **__: {"ETag": "x"})
    piece = b"x" * (64 * 2**10)
    files = fsspec.filesystem("s3", skip_instance_cache=True, anon=True)
    writer = module._BucketWriter(files, "batches/x")
    tracemalloc.start()
    try:
        for first in range(0, size, len(piece)):
            writer.write(piece[: size - first])
        writer.commit()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    most = s3_storage.writer_bytes(size)
    assert peak <= most + 2 * len(piece)
    assert most <= s3_storage.writer_bytes(None) < 3 * UPLOAD_PART_BYTES


async def test_what_is_deleted_is_gone(any_storage: FileStorage) -> None:
    for name in ("one", "folder/a", "folder/b", "folder2"):
        await write(any_storage, name, b"x")
    await any_storage.delete("one")
    await any_storage.delete("one")
    await any_storage.delete_folder("folder")
    await any_storage.delete_folder("folder")
    assert [each.name for each in await any_storage.listing()] == ["folder2"]
    for name in ("one", "folder/a"):
        with pytest.raises(StoredFileGone):
            await any_storage.size(name)
        with pytest.raises(StoredFileGone):
            await read(any_storage, name)


async def test_a_listing_tells_files_from_folders(any_storage: FileStorage) -> None:
    await write(any_storage, "one", b"x")
    await write(any_storage, "folder/a", b"x")
    found = {each.name: each.changed_at for each in await any_storage.listing()}
    assert found.pop("folder") is None
    changed_at = found.pop("one")
    assert changed_at is not None
    assert changed_at > 1.7e9
    assert not found


@pytest.mark.parametrize("name", ["", "../up", "a/b/c", "/etc", ".hidden", "a/..", "a b", "a\n"])
async def test_a_name_leads_nowhere_else(storage: FileStorage, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        await storage.size(name)


async def test_a_storage_that_is_not_there_is_no_missing_file(
    storage: FileStorage, s3_endpoint: str
) -> None:
    for away in (
        storage,
        FileStorage("s3://no-such-bucket", endpoint_url=s3_endpoint),
    ):
        with pytest.raises(StorageError) as caught:
            await away.size("file-1")
        assert not isinstance(caught.value, StoredFileGone)


async def test_a_server_that_is_away_is_a_storage_error(
    monkeypatch: pytest.MonkeyPatch, s3_endpoint: str
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    away = FileStorage("s3://batches", endpoint_url="http://127.0.0.1:1")
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1"):
        await away.size("file-1")


async def test_a_full_disk_is_a_storage_error_and_leaves_nothing(
    storage: FileStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="No space left"):
        await write(storage, "file-1", b"x")
    assert not temporary_files(tmp_path)
    assert await storage.listing() == []


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("gs://bucket", None),
        ("http://host/x", None),
        ("", None),
        ("s3://", None),
        ("/", None),
        ("/folder", "http://localhost:9000"),
    ],
)
def test_what_is_no_storage_is_refused(url: str, endpoint: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        FileStorage(url, endpoint_url=endpoint)
    assert caught.value.field in ("batch_storage", "batch_storage_endpoint")


def test_tasks_do_not_start_with_what_is_no_storage() -> None:
    with pytest.raises(InvalidRequestError, match="gs:// is not supported"):
        read_settings({"batch_storage": "gs://bucket"})


def test_s3_without_its_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match=r"inferq\[s3\]"):
        FileStorage("s3://bucket/prefix")


def test_a_folder_may_be_given_in_three_ways(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    names = {FileStorage(url).name for url in (str(tmp_path / "x"), f"file://{tmp_path}/x", "x")}
    assert names == {f"file://{tmp_path}/x"}
