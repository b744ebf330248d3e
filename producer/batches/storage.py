"""Where the bytes of files lie: a folder, or a bucket of S3 or what speaks like it."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import io
import os
import re
import secrets
import tempfile
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeVar
from urllib.parse import urlsplit

import fsspec
import structlog

from inferq.protocol.errors import InferqError, InvalidRequestError, MissingExtraError

logger = structlog.get_logger("inferq.batches")

#: Bytes read at once.
READ_BYTES: Final = 4 * 2**20
#: Bytes of a part of an upload to S3: the fewest that it takes.
UPLOAD_PART_BYTES: Final = 5 * 2**20
#: Operations of one storage under way at once, each in a thread of the storage's own.
MAX_THREADS: Final = 16
#: Time-outs in seconds of one request to S3.
S3_CONNECT_TIMEOUT_S: Final = 5
S3_READ_TIMEOUT_S: Final = 60
#: Seconds that `FileStorage.check` waits for a storage.
CHECK_TIMEOUT_S: Final = 5.0

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(?:/[A-Za-z0-9][A-Za-z0-9_.-]*)?")
_PROTOCOL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_TEMPORARY: Final = ".tmp"
#: What S3, and what speaks like it, may call a bucket; that of an access point is an ARN.
_BUCKET: Final = re.compile(r"[A-Za-z0-9._-]{3,255}|arn:.+")
#: What goes wrong with a folder that waiting does not mend, unlike a full or unreachable volume.
_LASTING: Final = frozenset(
    {
        *(errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.EISDIR, errno.ELOOP),
        *(errno.EACCES, errno.EPERM, errno.EROFS),
        *(errno.ENAMETOOLONG, errno.EINVAL, errno.ENOTSUP),
    }
)

T = TypeVar("T")


class StorageError(InferqError):
    """The storage is away, full, or does not let us; the same may succeed later."""


class StoredFileGone(StorageError):
    """There is no file of that name in the storage."""


class FileWriter(Protocol):
    """A file that is being written: there as a whole once `commit` returns, or not at all."""

    @property
    def size(self) -> int:
        """Bytes taken so far."""

    async def write(self, data: bytes | bytearray) -> None:
        """Take the next bytes."""

    async def commit(self) -> None:
        """Make the file be there, in place of another of its name."""


@dataclass(frozen=True, slots=True)
class StoredName:
    """A file or folder of the storage; `changed_at` in seconds since 1970, None of a folder."""

    name: str
    changed_at: float | None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Build from a row of fsspec's listing."""
        name = str(row["name"]).rstrip("/").rpartition("/")[2]
        if row["type"] == "directory":
            return cls(name, None)
        changed: float | datetime = row["mtime"] if "mtime" in row else row["LastModified"]
        return cls(name, changed.timestamp() if isinstance(changed, datetime) else changed)


class FileStorage:
    """Files by name, below `url`: a folder's path, `file://…`, or `s3://bucket/prefix`.

    `endpoint_url` is that of a storage that speaks like S3; credentials and region come from the
    environment as with every AWS client. Names are made by us: an id, or two joined by a slash.
    Raises `InvalidRequestError` (field `batch_storage`, `batch_storage_endpoint`) for a URL that is
    none of these and `MissingExtraError` without s3fs; its methods raise `StorageError`. `close`
    ends its threads.
    """

    def __init__(self, url: str, *, endpoint_url: str | None = None) -> None:
        found = _PROTOCOL.match(url)
        protocol = "file" if found is None else found[1].lower()
        if protocol not in ("file", "s3") or not url:
            raise InvalidRequestError(
                f"{protocol}:// is not supported; give a folder, file://… or s3://bucket/prefix",
                field="batch_storage",
            )
        self._is_local = protocol == "file"
        path = url if found is None else url[found.end() :]
        if endpoint_url is not None and self._is_local:
            raise InvalidRequestError("goes with s3:// only", field="batch_storage_endpoint")
        if not path.strip("/"):
            raise InvalidRequestError("names no folder or bucket", field="batch_storage")
        self._root = str(Path(path).resolve()) if self._is_local else path.strip("/")
        if not self._is_local:
            _check_bucket(self._root.partition("/")[0])
        self._options: dict[str, Any] = {"auto_mkdir": True}
        if not self._is_local:
            self._options = _s3_options(endpoint_url)
        self._made: Any = None
        self._lock = threading.Lock()
        # not the loop's, which resolves names: a storage that hangs must not stop that
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="inferq-storage")
        self.name = f"{protocol}://{self._root}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def close(self) -> None:
        """Let its threads end, once nothing is read or written any more."""
        self._threads.shutdown(wait=False)

    async def check(self) -> None:
        """Find out by a file that is written and removed whether the storage can be used.

        Raises `InvalidRequestError` (field `batch_storage`) for a folder that cannot be made or
        written however long one waits, and `StorageError` for what may yet come: a volume that is
        full or away, a bucket that is not there or cannot be reached within `CHECK_TIMEOUT_S`.
        """
        probe = self._probe_folder if self._is_local else self._probe_bucket
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await self._call(probe)
        except TimeoutError:
            raise StorageError(f"{self.name}: no answer within {CHECK_TIMEOUT_S:g} s") from None

    async def check_at_start(self) -> None:
        """Log as a warning what `check` finds that may yet come; raise what it says will not."""
        try:
            await self.check()
        except StorageError as error:
            logger.warning("storage cannot be used yet", setting="batch_storage", error=str(error))

    def _probe_folder(self, _: Any) -> None:
        try:
            Path(self._root).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._root) as file:
                file.write(b"x")
        except OSError as error:
            if error.errno not in _LASTING:
                raise
            code = errno.ENOTDIR if error.errno == errno.EEXIST else error.errno
            raise InvalidRequestError(
                f"{self._root} cannot be written: {os.strerror(code)}", field="batch_storage"
            ) from None

    def _probe_bucket(self, files: Any) -> None:
        path = self._path(f"inferq-check-{secrets.token_hex(8)}")
        files.pipe_file(path, b"x")
        files.rm_file(path)

    def writer_bytes(self, size: int | None) -> int:
        """Return how many bytes a writer holds at most of a file of `size` bytes; None: any size.

        Those of the write under way are the caller's.
        """
        if self._is_local:
            return io.DEFAULT_BUFFER_SIZE
        part = UPLOAD_PART_BYTES if size is None else min(size, UPLOAD_PART_BYTES)
        # the part that is gathered, whose buffer grows by eighths, and a copy while it is sent
        return 2 * part + part // 4

    @asynccontextmanager
    async def writer(self, name: str) -> AsyncIterator[FileWriter]:
        """Write a file; without `commit` nothing of it stays."""
        kind = _FolderWriter if self._is_local else _BucketWriter
        made = await self._call(lambda files: kind(files, self._path(name)))
        writer = _ThreadedWriter(self, made)
        try:
            yield writer
        finally:
            await writer.close()

    async def read(
        self, name: str, offset: int = 0, *, at_once: int = READ_BYTES
    ) -> AsyncGenerator[bytes]:
        """Yield a file's bytes from `offset` on, `at_once` at a time."""
        path = self._path(name)
        size = await self.size(name)
        while offset < size:
            end = min(offset + at_once, size)
            data = await self._call(partial(_read_range, path=path, start=offset, end=end))
            if not data:
                raise StorageError(f"{name} ends at byte {offset} of {size}")
            yield data
            offset += len(data)

    async def size(self, name: str) -> int:
        """Return the bytes that a file has; raise `StoredFileGone` if it is not there."""
        path = self._path(name)
        return int((await self._call(lambda files: files.info(path)))["size"])

    async def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        try:
            await self.size(name)
        except StoredFileGone:
            return False
        return True

    async def delete(self, name: str) -> None:
        """Remove a file, if it is there."""
        path = self._path(name)
        try:
            await self._call(lambda files: files.rm_file(path))
        except StoredFileGone:
            return

    async def delete_folder(self, name: str) -> None:
        """Remove all files whose names begin with `name` and a slash."""
        path = self._path(name)

        def remove(files: Any) -> None:
            if files.exists(path):
                files.rm(path, recursive=True)

        try:
            await self._call(remove)
        except StoredFileGone:
            return

    async def listing(self) -> list[StoredName]:
        """Return what lies in the storage, the files in its folders aside."""

        def read(files: Any) -> list[StoredName]:
            files.invalidate_cache()
            rows = files.ls(self._root, detail=True) if files.exists(self._root) else []
            return [StoredName.from_row(row) for row in rows]

        return await self._call(read)

    async def folder_changed_at(self, name: str) -> float | None:
        """Return when a folder's newest file was written, in seconds since 1970; None without."""
        path = self._path(name)

        def read(files: Any) -> float | None:
            rows = files.ls(path, detail=True) if files.exists(path) else []
            found = (StoredName.from_row(row).changed_at for row in rows)
            return max((each for each in found if each is not None), default=None)

        try:
            return await self._call(read)
        except StoredFileGone:
            return None

    async def call(self, operation: Callable[[], T]) -> T:
        """Perform a blocking operation in a thread; errors are `StorageError`s."""
        return await self._call(lambda _: operation())

    async def _call(self, operation: Callable[[Any], T]) -> T:
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, context.run, self._translated, operation)

    def _translated(self, operation: Callable[[Any], T]) -> T:
        try:
            return operation(self._files())
        except InferqError:
            raise
        except FileNotFoundError as error:
            self._check_root()
            raise StoredFileGone(f"{self.name}: {error} is not there") from None
        except Exception as error:  # each driver has errors of its own
            raise StorageError(f"{self.name}: {type(error).__name__}: {error}") from error

    def _check_root(self) -> None:
        """Raise `StorageError` if not only a file is missing, but all there is."""
        bucket = self._root if self._is_local else self._root.partition("/")[0]
        if not self._files().exists(bucket):
            raise StorageError(f"{self.name}: {bucket} is not there") from None

    def _files(self) -> Any:
        with self._lock:
            if self._made is None:
                protocol = "file" if self._is_local else "s3"
                self._made = fsspec.filesystem(protocol, skip_instance_cache=True, **self._options)
            return self._made

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(f"{name[:80]!r} is not a name in the storage", field="name")
        return f"{self._root}/{name}"


def _check_bucket(name: str) -> None:
    if not _BUCKET.fullmatch(name):
        raise InvalidRequestError(
            f"{name[:80]!r} cannot be a bucket's name: 3 to 255 letters, digits, '.', '-' and '_'",
            field="batch_storage",
        )


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or an IPv6 address that is none
        is_url = False
    if not is_url:
        raise InvalidRequestError(
            f"{url[:80]!r} is not http://host or https://host", field="batch_storage_endpoint"
        )


def _s3_options(endpoint_url: str | None) -> dict[str, Any]:
    if endpoint_url is not None:
        _check_endpoint(endpoint_url)
    try:
        import s3fs  # noqa: F401 - an extra of its own
    except ImportError:
        raise MissingExtraError("s3", "s3fs") from None
    return {
        "endpoint_url": endpoint_url,
        "use_listings_cache": False,
        "config_kwargs": {
            "connect_timeout": S3_CONNECT_TIMEOUT_S,
            "read_timeout": S3_READ_TIMEOUT_S,
        },
    }


def _read_range(files: Any, *, path: str, start: int, end: int) -> bytes:
    data: bytes = files.cat_file(path, start=start, end=end)
    return data


class _BlockingWriter(Protocol):
    def __init__(self, files: Any, path: str) -> None: ...

    def write(self, data: bytes | bytearray) -> None: ...

    def commit(self) -> None: ...

    def abort(self) -> None: ...


class _FolderWriter:
    """Writes beside the file's place and renames, so that a reader sees all of it or nothing."""

    def __init__(self, files: Any, path: str) -> None:
        self._path = Path(path)
        self._temporary = Path(f"{path}.{secrets.token_hex(8)}{_TEMPORARY}")
        self._file = files.open(str(self._temporary), "wb")

    def write(self, data: bytes | bytearray) -> None:
        self._file.write(data)

    def commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abort(self) -> None:
        try:
            self._file.close()  # which writes what is buffered: a full disk is full here too
        finally:
            self._temporary.unlink()


class _BucketWriter:
    """An upload in parts, which S3 makes a file when it is completed."""

    def __init__(self, files: Any, path: str) -> None:
        self._file = files.open(path, "wb", block_size=UPLOAD_PART_BYTES, autocommit=False)

    def write(self, data: bytes | bytearray) -> None:
        self._file.write(data)

    def commit(self) -> None:
        self._file.close()
        self._file.commit()

    def abort(self) -> None:
        try:
            self._file.discard()
        finally:
            self._file.closed = True  # or it would upload what it holds once it is collected


class _ThreadedWriter:
    """Performs one operation after the other in a thread, also when who waits is cancelled."""

    def __init__(self, storage: FileStorage, writer: _BlockingWriter) -> None:
        self._storage = storage
        self._writer = writer
        self._running: asyncio.Task[None] | None = None
        self.size = 0
        self._is_committed = False

    async def write(self, data: bytes | bytearray) -> None:
        await self._perform(lambda: self._writer.write(data))
        self.size += len(data)

    async def commit(self) -> None:
        def commit() -> None:
            self._writer.commit()
            self._is_committed = True  # here: who waits for it may be cancelled meanwhile

        await self._perform(commit)

    async def close(self) -> None:
        """Leave nothing behind unless the file was committed."""
        if self._running is not None:
            await asyncio.wait([self._running])
        if self._is_committed:
            return
        try:
            await self._perform(self._writer.abort)
        except StorageError as error:
            logger.warning("unfinished file not removed", error=str(error))

    async def _perform(self, operation: Callable[[], None]) -> None:
        self._running = asyncio.create_task(self._storage.call(operation))
        await asyncio.shield(self._running)
