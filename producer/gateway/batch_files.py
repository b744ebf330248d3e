"""The files and batches of this gateway: where they are kept, and whose they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NoReturn

import structlog
from starlette.requests import Request

from inferq.producer.async_client import AsyncClient
from inferq.producer.batches.records import BatchRecord, FileRecord, is_batch_id, is_file_id
from inferq.producer.batches.storage import FileStorage, StorageError, StoredFileGone
from inferq.producer.batches.store import BatchStore
from inferq.producer.gateway.admission.access import Access
from inferq.producer.gateway.errors import DEFAULT_RETRY_S, SERVER, HttpError, retry_after
from inferq.producer.gateway.requests.body import BodyMemory
from inferq.producer.gateway.settings import GatewaySettings

logger = structlog.get_logger("inferq.gateway")

#: Bytes that uploads and downloads may hold at once, all together.
MAX_HELD_BYTES: Final = 64 * 2**20
#: Bytes that one download holds.
READ_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """The bytes of files, and the records of files and batches."""

    storage: FileStorage
    store: BatchStore
    #: What uploads and downloads hold of files, all together.
    memory: BodyMemory

    @classmethod
    def build(cls, settings: GatewaySettings, client: AsyncClient) -> BatchFiles | None:
        """Make it; None where the settings name no storage.

        Raises `InvalidRequestError` for a storage that cannot be, and `MissingExtraError`.
        """
        if settings.batch_storage is None:
            return None
        storage = FileStorage(settings.batch_storage, endpoint_url=settings.batch_storage_endpoint)
        return cls(storage, BatchStore(client), BodyMemory(MAX_HELD_BYTES))

    async def file(self, file_id: str, access: Access, *, param: str = "id") -> FileRecord:
        """Return the record of a file of the caller's; raise a 404 for any other."""
        record = await self.store.file(file_id) if is_file_id(file_id) else None
        if record is None or record.owner != access.key_id:
            _refuse_file(file_id, param)
        return record

    async def batch(self, batch_id: str, access: Access) -> BatchRecord:
        """Return the record of a batch of the caller's; raise a 404 for any other."""
        record = await self.store.batch(batch_id) if is_batch_id(batch_id) else None
        if record is None or record.owner != access.key_id:
            raise HttpError(
                404,
                f"No batch found with id {batch_id[:80]!r}.",
                param="id",
                code="batch_not_found",
            )
        return record

    async def content(self, file_id: str) -> tuple[int, AsyncIterator[bytes]]:
        """Return a file's size and its bytes; raise a 404 where the storage has lost it."""
        try:
            with storage_errors():
                size = await self.storage.size(file_id)
            return size, self.storage.read(file_id, at_once=READ_BYTES)
        except StoredFileGone:
            logger.error("file not in the storage", file=file_id)
            _refuse_file(file_id, "id")

    async def remove(self, file_id: str) -> None:
        """Remove the bytes of a file that has no record any more."""
        try:
            await self.storage.delete(file_id)
        except StorageError as error:  # `inferq tasks` removes what nobody knows
            logger.error("bytes of a file not removed", file=file_id, error=str(error))


def batch_files(request: Request) -> BatchFiles:
    """Return the gateway's files and batches; raise a 501 where it has no storage for them."""
    files: BatchFiles | None = request.app.state.gateway.batches
    if files is None:
        raise HttpError(
            501,
            "This gateway keeps no files, and so takes no batches: its setting --batch-storage "
            "(INFERQ_BATCH_STORAGE) names no place for them.",
            type=SERVER,
            code="batches_not_configured",
        )
    return files


@contextmanager
def storage_errors() -> Iterator[None]:
    """Make a 503 of a storage that fails; a file that is gone is the caller's to tell."""
    try:
        yield
    except StoredFileGone:
        raise
    except StorageError as error:
        logger.error("storage failed", error=str(error))
        raise HttpError(
            503,
            "The storage of files cannot be used at present. Try again.",
            type=SERVER,
            code="storage_unavailable",
            headers=retry_after(DEFAULT_RETRY_S),
        ) from error


def _refuse_file(file_id: str, param: str) -> NoReturn:
    raise HttpError(
        404, f"No such File object: {file_id[:80]!r}.", param=param, code="file_not_found"
    )
