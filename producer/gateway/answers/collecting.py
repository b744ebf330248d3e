"""Whole answers: the jobs of a response read to their ends, and errors in the request's words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from inferq.producer import StreamEvent
from inferq.producer.gateway.answers.answer import JobAnswer
from inferq.producer.gateway.answers.choices import JobChoices
from inferq.producer.gateway.answers.note import Kind, Note
from inferq.producer.gateway.errors import HttpError
from inferq.producer.gateway.requests.submission import TOKENS_FIELD, Submitted
from inferq.protocol.errors import JobCancelled, JobExpired, JobFailed
from inferq.protocol.task_ends import end_tasks

#: The protocol's name of the form that an answer must have.
_FORM: Final = "structured_outputs"
#: Jobs of one answer that are read at once.
_READ_AT_ONCE: Final = 64


#: Gives choices the prompt that they begin with, which the first event has as tokens only.
AddEcho = Callable[[JobChoices, StreamEvent], Awaitable[None]]


async def collect_answers(
    jobs: Submitted, *, timeout_s: float, add_echo: AddEcho | None = None
) -> list[JobAnswer]:
    """Read all jobs to their ends; the first that ends without an answer takes the others with it.

    Raises what `TokenStream` and `add_echo` raise; `timeout_s` is for the whole of each job.
    `add_echo` None is `Submitted.add_echo`.
    """
    add_echo = add_echo or jobs.add_echo
    answers = [JobAnswer(choices) for choices in jobs.choices()]
    slots = asyncio.Semaphore(_READ_AT_ONCE)

    async def read(answer: JobAnswer) -> None:
        async with (
            slots,
            jobs.client.stream(
                answer.choices.job_id, timeout_s=timeout_s, total_timeout_s=timeout_s
            ) as stream,
        ):
            async for event in stream:
                if answer.choices.needs_echo:
                    await add_echo(answer.choices, event)
                answer.feed(event)

    reading = [asyncio.create_task(read(answer)) for answer in answers]
    try:
        await asyncio.gather(*reading)
    except (JobFailed, JobCancelled, JobExpired):
        await end_tasks(reading)
        await jobs.cancel()
        raise
    finally:
        await end_tasks(reading)
    return answers


def name_as_asked(answer: HttpError, note: Note) -> None:
    """Give an error the request's own name of a field, where the protocol has another."""
    param, name = answer.param or "", None
    if param == TOKENS_FIELD:
        name = "prompt" if note.kind is Kind.COMPLETION else "messages"
    elif param.partition(".")[0] == _FORM:
        name = note.form_field
    if name is not None and name != param:
        answer.message = answer.message.replace(param, name, 1)
        answer.param = name
