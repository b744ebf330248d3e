"""`/v1/batches`: files of requests that are answered when there is time for them."""

from __future__ import annotations

import hashlib
import time
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request

from inferq.producer.batches.records import INPUT_PURPOSE, BatchRecord, Terms, new_batch_id
from inferq.producer.gateway.admission.access import Access
from inferq.producer.gateway.answers.batch_objects import batch_object, listed
from inferq.producer.gateway.batch_files import batch_files
from inferq.producer.gateway.errors import BadRequest, HttpError
from inferq.producer.gateway.gateway import Gateway
from inferq.producer.gateway.requests.batch_body import BatchBody
from inferq.producer.gateway.requests.body import read_body, request_body
from inferq.producer.gateway.requests.delivery import IDEMPOTENCY_HEADER, requested_key
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import Lane

router = APIRouter(tags=["batches"])

#: Seconds of the only window that OpenAI has.
WINDOW_S: Final = 24 * 3600
MAX_LISTED: Final = 100


@router.post("/v1/batches", summary="Begin a batch", openapi_extra=request_body(BatchBody))
async def create_batch(request: Request) -> dict[str, Any]:
    """Have the requests of a file answered; their file is checked first, by `inferq tasks`."""
    gateway: Gateway = request.app.state.gateway
    files = batch_files(request)
    access: Access = request.state.access
    body = await read_body(request, BatchBody)
    access.check_lane(Lane.LOW, param="endpoint")
    async with await gateway.limiter.admit(access, streams=0):
        file = await files.file(body.input_file_id, access, param="input_file_id")
        if file.purpose != INPUT_PURPOSE:
            raise BadRequest(
                f"input_file_id: its purpose is {file.purpose!r}, not {INPUT_PURPOSE!r}",
                param="input_file_id",
            )
        record = _record(body, requested_key(request.headers), gateway.settings, access)
        await files.store.create_batch(record)
        # where an idempotency key is repeated, it is there already, and maybe another
        kept = await files.store.batch(record.id) or record
    if _asked(kept) != _asked(record):
        raise HttpError(
            409,
            f"{IDEMPOTENCY_HEADER}: it already belongs to batch {kept.id}, which differs.",
            param=IDEMPOTENCY_HEADER,
            code="idempotency_conflict",
        )
    return batch_object(kept)


@router.get("/v1/batches", summary="List batches")
async def list_batches(
    request: Request,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
) -> dict[str, Any]:
    """Return the caller's batches, the newest first; `after` is the id of the one before."""
    files = batch_files(request)
    access: Access = request.state.access
    page = await files.store.batches(access.key_id, after=after, limit=limit)
    return listed([batch_object(record) for record in page.records], page.has_more)


@router.get("/v1/batches/{batch_id}", summary="Describe a batch")
async def describe_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Return where a batch stands."""
    return batch_object(await batch_files(request).batch(batch_id, request.state.access))


@router.post("/v1/batches/{batch_id}/cancel", summary="Cancel a batch")
async def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Ask for a batch's end; what is answered already stays in its output file."""
    files = batch_files(request)
    record = await files.batch(batch_id, request.state.access)
    try:
        cancelled = await files.store.request_cancel(record.id)
    except InvalidRequestError:
        current = await files.batch(batch_id, request.state.access)
        raise HttpError(
            409,
            f"A batch with status {current.status.value!r} cannot be cancelled.",
            param="id",
            code="batch_ended",
        ) from None
    return batch_object(cancelled or record)


def _record(
    body: BatchBody, key: str | None, settings: GatewaySettings, access: Access
) -> BatchRecord:
    """Return the record of a new batch; with the same key, of the same id."""
    now = int(time.time())
    expiry = body.output_expires_after
    return BatchRecord(
        id=_batch_id(key, access),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        created_at=now,
        expires_at=now + WINDOW_S,
        completion_window=body.completion_window,
        owner=access.key_id,
        metadata=body.metadata,
        output_expires_after_s=None if expiry is None else expiry.seconds,
        terms=_terms(settings, access),
    )


def _batch_id(key: str | None, access: Access) -> str:
    if key is None:
        return new_batch_id()
    # a header has no line breaks, so that no two keys look alike
    digest = hashlib.sha256(f"{access.key_id or ''}\n{key}".encode()).hexdigest()
    return f"batch_{digest[:32]}"


def _asked(record: BatchRecord) -> tuple[object, ...]:
    """Return what a request for a batch decides."""
    return record.input_file_id, record.endpoint, record.metadata, record.output_expires_after_s


def _terms(settings: GatewaySettings, access: Access) -> Terms:
    """Return by what the batch's requests are answered: as this gateway would."""
    return Terms(
        queues=settings.queues,
        models=settings.models,
        allowed_models=None if access.models is None else tuple(sorted(access.models)),
        default_max_tokens=settings.default_max_tokens,
        tool_format=settings.tool_format,
        accept_webhooks=settings.accept_webhooks,
        max_prompts=settings.max_prompts,
        max_outputs=settings.max_outputs,
    )
