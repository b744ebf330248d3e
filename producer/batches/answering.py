"""A checked line to its answer: submitted, waited for however long it takes, and read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

import structlog
from redis.asyncio import Redis

from inferq.producer import StreamEvent
from inferq.producer.async_client import AsyncClient
from inferq.producer.batches.outcomes import Answered, Outcome, Unanswered
from inferq.producer.gateway.answers.answer import response_body
from inferq.producer.gateway.answers.choices import JobChoices
from inferq.producer.gateway.answers.collecting import collect_answers, name_as_asked
from inferq.producer.gateway.answers.event_writer import total_usage
from inferq.producer.gateway.errors import to_http_error
from inferq.producer.gateway.requests.delivery import Delivery
from inferq.producer.gateway.requests.submission import Asked, Submitted, cancel_all, submit
from inferq.producer.server import jitter
from inferq.protocol.errors import (
    DecodeError,
    IdempotencyConflict,
    InferqError,
    InvalidRequestError,
    JobCancelled,
    JobError,
    JobExpired,
    JobNotFound,
    QueueFull,
    ResultTimeout,
    ServerLost,
    StreamExpired,
    StreamGap,
)
from inferq.protocol.keys import Lane, QueueKeys, partition_of
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.task_ends import end_tasks

logger = structlog.get_logger("inferq.batches")

#: How long a batch's results stay on the server, in seconds: as long as nobody may fetch them.
RETENTION_S: Final = 86_400.0
#: First and longest pause in seconds before a full queue, or a server that is away, is tried again.
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 10.0
#: Seconds without an event after which a job's stream is read anew.
IDLE_S: Final = 3600.0
#: How often a line is generated whose result the server has lost.
MAX_TRIES: Final = 3
#: Jobs that are forgotten in one go.
_FORGOTTEN_AT_ONCE: Final = 200
#: Shortest deadline of a job, in seconds.
_SHORTEST_S: Final = 0.001


class Ending(StrEnum):
    """Why lines that have no answer yet get none."""

    CANCELLED = "batch_cancelled"
    EXPIRED = "batch_expired"

    def outcome(self, job_ids: tuple[str, ...] = ()) -> Unanswered:
        """Return what such a line ends in."""
        return Unanswered(self.value, _ENDINGS[self], job_ids)


_ENDINGS: Final = {
    Ending.CANCELLED: "The batch was cancelled before this request was executed.",
    Ending.EXPIRED: "The batch's completion window passed before this request was executed.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweringPlan:
    """Where a batch's jobs go, and what they have in common.

    `seconds_left` says how long the batch still has; None: for ever.
    """

    client: AsyncClient
    batch_id: str
    lane: Lane
    owner: str | None
    seconds_left: Callable[[], float] | None = None


class _NoEcho(InferqError):
    """The batch ends, and the prompt that an answer begins with is not known."""


class LineAnswerer:
    """Answers lines; `ending` is set once those under way are to be given up."""

    def __init__(self, plan: AnsweringPlan) -> None:
        self._plan = plan
        self._under_way: dict[int, Submitted] = {}
        self._ends = asyncio.Event()
        self.ending: Ending | None = None

    async def end(self, ending: Ending) -> None:
        """Give up what is under way: jobs that have not ended are cancelled, the others kept."""
        self.ending = self.ending or ending
        self._ends.set()
        await asyncio.gather(*(jobs.cancel() for jobs in list(self._under_way.values())))

    async def answer(self, asked: Asked, number: int) -> Outcome:
        """Return how a line ends, however long that takes.

        The same line asked again, also by another process, leads to the same jobs. Raises
        `InferqError` where it cannot be submitted or read, and that is not its own fault.
        """
        tries = 0
        while tries < MAX_TRIES:
            try:
                jobs = await self._submit(asked, number, tries)
            except IdempotencyConflict:  # an earlier version of us asked otherwise
                await self._cancel_submitted(asked, number, tries)
                tries += 1
                continue
            except InvalidRequestError as error:
                await self._cancel_submitted(asked, number, tries)
                return Answered.refused(to_http_error(error))
            if jobs is None:
                await self._cancel_submitted(asked, number, tries)
                return self._ended()
            try:
                return await self._collect(jobs, number)
            except (StreamExpired, StreamGap, JobNotFound) as error:
                tries += 1
                logger.warning("result lost", batch=self._plan.batch_id, error=str(error))
                await jobs.cancel()  # those beside it: all are asked anew
        return Unanswered("result_lost", f"The result was lost {MAX_TRIES} times.")

    def _ended(self, job_ids: tuple[str, ...] = ()) -> Unanswered:
        return (self.ending or Ending.EXPIRED).outcome(job_ids)

    async def _submit(self, asked: Asked, number: int, tries: int) -> Submitted | None:
        """Submit a line's jobs as soon as the queue takes them; None if the batch ends before."""
        plan, pause_s = self._plan, FIRST_PAUSE_S
        while True:
            delivery = self._delivery(number, tries)
            try:
                return await submit(
                    plan.client, plan.client.queue, asked, delivery, cancels_partial=False
                )
            except (QueueFull, ServerLost) as error:
                logger.debug("line waits", batch=plan.batch_id, line=number, error=str(error))
            if self.ending is not None:
                return None
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _cancel_submitted(self, asked: Asked, number: int, tries: int) -> None:
        """Cancel the jobs of a line that is not waited for, whoever submitted them, and when."""
        client, delivery = self._plan.client, self._delivery(number, tries)
        keys = [delivery.job_key(position) for position in range(len(asked.prompts))]
        try:
            found = await asyncio.gather(*(client.find_job(key) for key in keys if key is not None))
        except InferqError as error:  # as with jobs that cannot be cancelled: a deadline ends them
            logger.warning("jobs not cancelled", batch=self._plan.batch_id, error=str(error))
            return
        await cancel_all(client, [handle.id for handle in found if handle is not None])

    def _delivery(self, number: int, tries: int) -> Delivery:
        plan = self._plan
        return Delivery(
            lane=plan.lane,
            deadline_s=self._deadline_s(),
            key=f"{plan.batch_id}\n{number}" + (f"\n{tries}" if tries else ""),
            scope=plan.owner or "",
            cancel_on_disconnect=False,
        )

    def _deadline_s(self) -> float | None:
        left = self._plan.seconds_left
        return None if left is None else max(_SHORTEST_S, left())

    async def _collect(self, jobs: Submitted, number: int) -> Outcome:
        self._under_way[number] = jobs
        try:
            if self.ending is not None:
                await jobs.cancel()
            return await self._read(jobs)
        finally:
            del self._under_way[number]

    async def _read(self, jobs: Submitted) -> Outcome:
        while True:
            try:
                answers = await collect_answers(
                    jobs, timeout_s=IDLE_S, add_echo=partial(self._add_echo, jobs)
                )
            except ResultTimeout:
                continue
            except _NoEcho:
                return self._ended(jobs.ids)
            except (QueueFull, ServerLost) as error:
                logger.debug("result waits", batch=self._plan.batch_id, error=str(error))
                await asyncio.sleep(jitter(LONGEST_PAUSE_S))
                continue
            except (StreamExpired, StreamGap, JobNotFound):
                raise
            except (JobError, DecodeError, InvalidRequestError) as error:
                return self._of_error(error, jobs)
            usage = total_usage(answer.choices.usage for answer in answers)
            body = response_body(jobs.note, jobs.ids[0], answers)
            return Answered(200, body, jobs.ids[0], usage, jobs.ids)

    async def _add_echo(self, jobs: Submitted, choices: JobChoices, first: StreamEvent) -> None:
        """Learn the prompt's text by the batch's lane, as soon as the queue takes the question.

        Raises `_NoEcho` if the batch ends before.
        """
        plan, pause_s = self._plan, FIRST_PAUSE_S
        token_ids = list(first.prompt_token_ids or ())
        while True:
            try:
                told = await plan.client.tokenize(token_ids, model=jobs.note.model, lane=plan.lane)
            except (QueueFull, ResultTimeout, StreamExpired, StreamGap, JobNotFound) as error:
                logger.debug("echo waits", batch=plan.batch_id, error=str(error))
                if self.ending is not None:
                    raise _NoEcho(str(error)) from error
            else:
                choices.echo_text = told.text
                return
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _of_error(self, error: InferqError, jobs: Submitted) -> Outcome:
        is_ours = isinstance(error, JobExpired) and self._plan.seconds_left is not None
        if is_ours or (isinstance(error, JobCancelled) and self.ending is not None):
            return self._ended(jobs.ids)
        shown = to_http_error(error)
        name_as_asked(shown, jobs.note)
        return Answered.refused(shown, jobs.ids)

    async def _pause(self, seconds: float) -> None:
        """Wait, no longer than until the batch ends."""
        waiting = asyncio.create_task(self._ends.wait())
        await asyncio.wait([waiting], timeout=jitter(seconds))
        await end_tasks([waiting])


async def forget_jobs(client: AsyncClient, job_ids: Sequence[str]) -> None:
    """Let go of jobs whose results are kept elsewhere; what fails is left to their retention.

    So are those that have not ended: others of a line whose first failed.
    """
    by_partition: dict[int, list[str]] = {}
    for job_id in job_ids:
        by_partition.setdefault(partition_of(job_id), []).append(job_id)
    try:
        for partition, ids in by_partition.items():
            keys = QueueKeys(client.queue, partition)
            for first in range(0, len(ids), _FORGOTTEN_AT_ONCE):
                chunk = ids[first : first + _FORGOTTEN_AT_ONCE]
                await client.run(partial(_forget, keys, chunk), slot_key=keys.prefix)
    except InferqError as error:
        logger.warning("results not removed", jobs=len(job_ids), error=str(error))


async def _forget(keys: QueueKeys, job_ids: Sequence[str], redis: Redis) -> None:
    await QueueScripts(redis, keys).forget(*job_ids)
