"""From a checked request to its answer: let in, submitted, followed, written."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferq.producer.gateway.admission.access import Access
from inferq.producer.gateway.admission.limits import Admission
from inferq.producer.gateway.answers.answer import response_body
from inferq.producer.gateway.answers.choices import JobChoices
from inferq.producer.gateway.answers.collecting import collect_answers, name_as_asked
from inferq.producer.gateway.answers.event_writer import (
    KEEP_ALIVE,
    EventWriter,
    Place,
    total_usage,
)
from inferq.producer.gateway.answers.following import follow, merge
from inferq.producer.gateway.answers.note import MAX_LISTED_JOBS
from inferq.producer.gateway.answers.sse import EventStream, until_disconnected
from inferq.producer.gateway.directory import Served
from inferq.producer.gateway.errors import CLIENT_GONE, HttpError
from inferq.producer.gateway.gateway import Gateway
from inferq.producer.gateway.requests.delivery import Delivery
from inferq.producer.gateway.requests.schemas import GenerationBody
from inferq.producer.gateway.requests.submission import Asked, Submitted, submit
from inferq.producer.gateway.tracing import name_jobs, submission
from inferq.protocol.errors import ErrorCode, InvalidRequestError, JobFailed


def find_model(request: Request, model: str | None) -> Served:
    """Return who serves a model; raise an error if none does, or the key may not use it."""
    gateway: Gateway = request.app.state.gateway
    access: Access = request.state.access
    return gateway.directory.find(model, access)


async def respond(request: Request, body: GenerationBody, served: Served, asked: Asked) -> Response:
    """Submit what is asked for and answer with it, as a stream if the body wants one."""
    gateway: Gateway = request.app.state.gateway
    delivery = Delivery.of(request.headers, body, request.state.access)
    tokens = asked.token_bound(
        max_outputs=gateway.settings.max_outputs, max_model_len=served.max_model_len
    )
    if body.stream and len(asked.prompts) > MAX_LISTED_JOBS:
        raise InvalidRequestError(
            f"{len(asked.prompts)} prompts in one stream are more than {MAX_LISTED_JOBS}",
            field="prompt",
            limit=MAX_LISTED_JOBS,
        )
    async with AsyncExitStack() as stack:
        stack.enter_context(gateway.in_flight.slot())
        admission = await gateway.limiter.admit(
            request.state.access, tokens=tokens, streams=len(asked.prompts)
        )
        await stack.enter_async_context(admission)
        try:
            with submission(request, served.queue, len(asked.prompts)):
                jobs = await submit(served.client, served.queue, asked, delivery)
        except Exception as error:
            admission.used_tokens = 0
            raise gateway.to_http_error(error, served.queue) from error
        name_jobs(request, jobs.listed_ids)
        if body.stream:
            return stream_response(
                gateway,
                jobs,
                cancel_on_disconnect=delivery.cancel_on_disconnect,
                admission=admission,
                stack=stack.pop_all(),
            )
        return await _whole_response(request, jobs, delivery, admission)


def stream_response(
    gateway: Gateway,
    jobs: Submitted,
    *,
    seen: Sequence[Place] | None = None,
    cancel_on_disconnect: bool = False,
    admission: Admission | None = None,
    stack: AsyncExitStack | None = None,
) -> EventStream:
    """Return the jobs' response as a stream, of what lies after `seen`."""
    admission = admission or Admission()
    return EventStream(
        _pieces(gateway, jobs, seen, admission),
        headers={**jobs.headers, **admission.headers},
        to_http_error=lambda error: _to_http_error(gateway, jobs, error),
        closing=gateway.in_flight.closing,
        on_disconnect=jobs.cancel if cancel_on_disconnect else None,
        stack=stack,
    )


async def _pieces(
    gateway: Gateway, jobs: Submitted, seen: Sequence[Place] | None, admission: Admission
) -> AsyncGenerator[bytes, None]:
    settings = gateway.settings
    choices = jobs.choices()
    writer = EventWriter(choices, jobs.encoder(), seen)
    sources = [
        follow(
            jobs.client,
            job_id,
            keep_alive_s=settings.keep_alive_s,
            idle_s=settings.request_timeout_s,
            seen=0 if seen is None else seen[number][0],
        )
        for number, job_id in enumerate(jobs.ids)
    ]
    quiet_s = settings.keep_alive_s / 2
    written_at = time.monotonic()
    try:
        async with aclosing(merge(sources)) as batches:
            async for number, events in batches:
                if events and choices[number].needs_echo:
                    await jobs.add_echo(choices[number], events[0])
                for piece in writer.feed_all(number, events):
                    yield piece
                    written_at = time.monotonic()
                # events may bring nothing to write, as while a tool call is held back
                if time.monotonic() - written_at >= quiet_s:
                    yield KEEP_ALIVE
                    written_at = time.monotonic()
    except JobFailed as error:
        admission.used_tokens = _charge_of(error, jobs)
        if len(jobs.ids) > 1:
            await jobs.cancel()
        raise
    else:
        admission.used_tokens = _tokens_of(choices)
    finally:
        await admission.release()  # before the end is sent: the client's next request may follow
    yield writer.end()


async def _whole_response(
    request: Request, jobs: Submitted, delivery: Delivery, admission: Admission
) -> Response:
    gateway: Gateway = request.app.state.gateway
    headers = {**jobs.headers, **admission.headers}
    try:
        body = await until_disconnected(request.receive, _collect(gateway, jobs, admission))
    except Exception as error:
        answer = _to_http_error(gateway, jobs, error)
        answer.headers.update(headers)
        raise answer from error
    if body is None:
        if delivery.cancel_on_disconnect:
            await jobs.cancel()
        return Response(status_code=CLIENT_GONE)
    return Response(orjson.dumps(body), media_type="application/json", headers=headers)


async def _collect(gateway: Gateway, jobs: Submitted, admission: Admission) -> dict[str, Any]:
    """Read all jobs to their ends; the first that fails takes the others with it."""
    try:
        answers = await collect_answers(jobs, timeout_s=gateway.settings.request_timeout_s)
    except JobFailed as error:
        admission.used_tokens = _charge_of(error, jobs)
        raise
    admission.used_tokens = _tokens_of([answer.choices for answer in answers])
    return response_body(jobs.note, jobs.ids[0], answers)


def _tokens_of(choices: Sequence[JobChoices]) -> int:
    usage = total_usage(each.usage for each in choices)
    return usage.prompt_tokens + usage.completion_tokens


def _charge_of(error: JobFailed, jobs: Submitted) -> int | None:
    """Return no tokens for a request that no engine took; None where nobody knows what it used."""
    is_refused = error.info.code in ErrorCode.REFUSED
    return 0 if is_refused and len(jobs.ids) == 1 else None


def _to_http_error(gateway: Gateway, jobs: Submitted, error: Exception) -> HttpError:
    """Return an error in the words of the request, where the protocol has a name of its own."""
    answer = gateway.to_http_error(error, jobs.queue)
    name_as_asked(answer, jobs.note)
    return answer
