"""`/v1/streams/{id}`: go on with a response after a cut, on any gateway; or end its jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from fastapi import APIRouter, Request

from inferq.producer import AsyncClient
from inferq.producer.gateway.admission.access import Access
from inferq.producer.gateway.answers.chunks import job_id_of, response_id
from inferq.producer.gateway.answers.event_writer import Place, parse_places
from inferq.producer.gateway.answers.note import MAX_LISTED_JOBS, Note
from inferq.producer.gateway.answers.responding import stream_response
from inferq.producer.gateway.answers.sse import EventStream
from inferq.producer.gateway.errors import BadRequest
from inferq.producer.gateway.gateway import Gateway
from inferq.producer.gateway.requests.submission import Submitted
from inferq.producer.gateway.tracing import name_jobs
from inferq.protocol.errors import InvalidRequestError, JobNotFound
from inferq.protocol.keys import partition_of
from inferq.protocol.replies import CancelOutcome

router = APIRouter(tags=["streams"])

#: Longest list of ids in a path.
_MAX_ID_BYTES: Final = MAX_LISTED_JOBS * 64
_LAST_EVENT_ID: Final = "Last-Event-ID"


@router.get("/v1/streams/{stream_id}", summary="Go on with a response", response_model=None)
async def resume(request: Request, stream_id: str, last_event_id: str | None = None) -> EventStream:
    """Send what lies after `Last-Event-ID` (or `last_event_id`), or all of it.

    `stream_id` is the response's id, or the ids of jobs with commas between them.
    """
    gateway: Gateway = request.app.state.gateway
    jobs = await _find(gateway, request.state.access, stream_id)
    name_jobs(request, jobs.listed_ids)
    event_id = request.headers.get(_LAST_EVENT_ID, last_event_id)
    seen = None if event_id is None else _places(event_id, jobs)
    async with AsyncExitStack() as stack:
        stack.enter_context(gateway.in_flight.slot())
        return stream_response(gateway, jobs, seen=seen, stack=stack.pop_all())


@router.delete("/v1/streams/{stream_id}", summary="Cancel a response")
async def cancel(request: Request, stream_id: str) -> dict[str, Any]:
    """Ask for the end of the response's jobs; those that are over stay as they are."""
    jobs = await _find(request.app.state.gateway, request.state.access, stream_id)
    name_jobs(request, jobs.listed_ids)
    outcomes = await asyncio.gather(*(jobs.client.cancel(job_id) for job_id in jobs.ids))
    return {
        "id": stream_id,
        "object": "stream",
        "cancelled": any(outcome is not CancelOutcome.FINISHED for outcome in outcomes),
        "jobs": [
            {"id": job_id, "outcome": outcome.value}
            for job_id, outcome in zip(jobs.ids, outcomes, strict=True)
        ],
    }


async def _find(gateway: Gateway, access: Access, stream_id: str) -> Submitted:
    """Return the jobs of a response that this key began; raise `JobNotFound` for any other."""
    if len(stream_id) > _MAX_ID_BYTES:
        raise BadRequest("The id is too long.", param="id")
    given = [part.strip() for part in stream_id.split(",")]
    named = [job_id_of(part) for part in given]
    if len(named) > MAX_LISTED_JOBS or len(set(named)) < len(named):
        raise BadRequest(f"The id must name at most {MAX_LISTED_JOBS} jobs, each once.", param="id")
    for job_id in named:
        partition_of(job_id)
    queue, first = await _find_first(gateway, access, named[0])
    client = gateway.clients[queue]
    ids = named
    if len(given) == 1 and given != named:
        ids = [*named, *first.jobs]
        if len(ids) < first.prompts and first.position == 0:
            raise BadRequest(
                f"The response has {first.prompts} jobs: name those to follow, with commas.",
                param="id",
            )
    others = await asyncio.gather(*(_note_of(client, access, job_id) for job_id in ids[1:]))
    notes = [first, *others]
    if any(note.kind is not first.kind for note in notes):
        raise BadRequest("The id names jobs of several kinds.", param="id")
    for part, job_id in zip(given, named, strict=True):
        if part not in (job_id, response_id(first.kind, job_id)):
            raise JobNotFound(part)
    return Submitted(client, queue, tuple(ids), tuple(notes), (None,) * len(ids))


async def _find_first(gateway: Gateway, access: Access, job_id: str) -> tuple[str, Note]:
    found = await asyncio.gather(
        *(_note_of(client, access, job_id) for client in gateway.clients.values()),
        return_exceptions=True,
    )
    for queue, note in zip(gateway.clients, found, strict=True):
        if isinstance(note, Note):
            return queue, note
    for failure in found:
        if isinstance(failure, BaseException) and not isinstance(failure, JobNotFound):
            raise failure
    raise JobNotFound(job_id)


async def _note_of(client: AsyncClient, access: Access, job_id: str) -> Note:
    status = await client.status(job_id)
    note = Note.decode(status.note)
    if note is None or note.key != access.key_id:
        raise JobNotFound(job_id)
    return note


def _places(event_id: str, jobs: Submitted) -> Sequence[Place]:
    places = parse_places(event_id, len(jobs.ids))
    for (tokens, _), note in zip(places, jobs.notes, strict=True):
        if note.budget is not None and tokens > note.budget:
            raise InvalidRequestError(
                f"{event_id!r} is beyond the stream's end: it has {note.budget} tokens at most",
                field=_LAST_EVENT_ID,
                limit=note.budget,
            )
    return places
