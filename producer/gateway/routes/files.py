"""`/v1/files`: what batches read, and what they leave behind."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from inferq.producer.batches.records import INPUT_PURPOSE, FileRecord, new_file_id
from inferq.producer.batches.surveys import MAX_FILE_BYTES
from inferq.producer.gateway.admission.access import Access
from inferq.producer.gateway.answers.batch_objects import file_object, listed
from inferq.producer.gateway.batch_files import (
    READ_BYTES,
    BatchFiles,
    batch_files,
    storage_errors,
)
from inferq.producer.gateway.errors import HttpError
from inferq.producer.gateway.gateway import Gateway
from inferq.producer.gateway.requests.batch_body import upload_form
from inferq.producer.gateway.requests.body import BodyMemory
from inferq.producer.gateway.requests.upload import WRITE_BYTES, read_upload
from inferq.protocol.errors import InvalidRequestError

router = APIRouter(tags=["batches"])

#: Most files in one answer, as OpenAI has it.
MAX_LISTED: Final = 10_000


@router.post("/v1/files", summary="Upload a file", openapi_extra=upload_form())
async def upload_file(request: Request) -> dict[str, Any]:
    """Keep a file; it is written as it comes, and is there once it is whole."""
    gateway: Gateway = request.app.state.gateway
    files = batch_files(request)
    access: Access = request.state.access
    with gateway.in_flight.slot():
        async with files.memory.reading() as memory:
            memory.grow(WRITE_BYTES + files.storage.writer_bytes(_length_of(request)))
            async with await gateway.limiter.admit(access, streams=0):
                record = await _receive(request, files, gateway.settings.batch_file_age_s)
    return file_object(record)


@router.get("/v1/files", summary="List files")
async def list_files(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> dict[str, Any]:
    """Return the caller's files by the time they were made; `after` is the id of the one before."""
    files = batch_files(request)
    access: Access = request.state.access
    page = await files.store.files(
        access.key_id, after=after, limit=limit, order=order, purpose=purpose
    )
    return listed([file_object(record) for record in page.records], page.has_more)


@router.get("/v1/files/{file_id}", summary="Describe a file")
async def describe_file(request: Request, file_id: str) -> dict[str, Any]:
    """Return what is known of a file."""
    return file_object(await batch_files(request).file(file_id, request.state.access))


@router.get("/v1/files/{file_id}/content", summary="Download a file", response_model=None)
async def download_file(request: Request, file_id: str) -> Response:
    """Send a file's bytes."""
    files = batch_files(request)
    record = await files.file(file_id, request.state.access)
    size, content = await files.content(record.id)
    name = quote(record.filename, safe="")
    headers = {
        "Content-Length": str(size),
        "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
        "X-Content-Type-Options": "nosniff",
    }
    return _Download(content, headers, files.memory)


@router.delete("/v1/files/{file_id}", summary="Delete a file")
async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
    """Delete a file, unless a batch that goes on reads it."""
    files = batch_files(request)
    record = await files.file(file_id, request.state.access)
    try:
        await files.store.delete_file(record.id)
    except InvalidRequestError as error:
        message = f"The file is in use: {error}."
        raise HttpError(409, message, param="id", code="file_in_use") from None
    await files.remove(record.id)
    return {"id": record.id, "object": "file", "deleted": True}


class _Download(StreamingResponse):
    """A file's bytes, some of which are held as long as their client takes them."""

    def __init__(
        self, content: AsyncIterator[bytes], headers: dict[str, str], memory: BodyMemory
    ) -> None:
        super().__init__(content, media_type="application/octet-stream", headers=headers)
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, or raise a 503 where too many are sent; see the ASGI specification."""
        async with self._memory.reading() as held:
            held.grow(READ_BYTES)
            await super().__call__(scope, receive, send)


def _length_of(request: Request) -> int | None:
    """Return how many bytes the body has, where that is known before it is read."""
    length = request.headers.get("content-length", "")
    return int(length[:20]) if length.isascii() and length.isdigit() else None


async def _receive(request: Request, files: BatchFiles, age_s: float) -> FileRecord:
    """Write the upload to the storage and make its record; what is not whole leaves nothing."""
    access: Access = request.state.access
    file_id = new_file_id()
    with storage_errors():
        async with files.storage.writer(file_id) as writer:
            upload = await read_upload(request, writer, limit=MAX_FILE_BYTES)
            await writer.commit()
    now = int(time.time())
    record = FileRecord(
        id=file_id,
        bytes=upload.num_bytes,
        created_at=now,
        filename=upload.filename,
        purpose=INPUT_PURPOSE,
        owner=access.key_id,
        expires_at=now + (upload.expires_after_s or int(age_s)),
    )
    # bytes without a record, should this fail, are removed by `inferq tasks`: it may have succeeded
    await files.store.create_file(record)
    return record
