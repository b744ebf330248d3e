"""A claimed job's way through the worker: decode, tokenize, generate, detokenize, publish, end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog
from redis.asyncio import Redis

from inferq.protocol.errors import (
    DecodeError,
    ErrorCode,
    ErrorInfo,
    InvalidRequestError,
    ProtocolVersionError,
    QueueFull,
    ServerLost,
)
from inferq.protocol.keys import Lane, QueueKeys
from inferq.protocol.messages import FinishReason, Job, Terminal, Timings, Usage
from inferq.protocol.replies import ClaimedJob
from inferq.protocol.scripts import QueueScripts
from inferq.worker.engine.output import OutputText
from inferq.worker.engine.request import PreparedRequest, prepare_request
from inferq.worker.engine.tokenizer import Tokenizer
from inferq.worker.engine_client import EngineClient, EngineInfo, EngineOutput
from inferq.worker.queue.publisher import Publisher
from inferq.worker.queue.replay import read_published
from inferq.worker.queue.running import RunningJob, RunningJobs

logger = structlog.get_logger("inferq.jobs")

#: Engine priority of each lane; smaller is more urgent.
LANE_PRIORITY = {Lane.HIGH: -1, Lane.NORMAL: 0, Lane.LOW: 1}


@dataclass(slots=True)
class Generation:
    """A job that is in the engine: its text so far, and what its usage and timings are made of."""

    job: RunningJob
    text: OutputText
    prompt_tokens: int
    cached_tokens: int = 0
    first_token_at: float | None = None


class Dispatcher:
    """Moves jobs between the queue and the engine; every method runs on the event loop."""

    def __init__(
        self,
        *,
        worker: str,
        model_name: str,
        retention_ms: int,
        redis_client: Redis,
        keys: QueueKeys,
        scripts: QueueScripts,
        tokenizer: Tokenizer,
        engine: EngineClient,
        info: EngineInfo,
        jobs: RunningJobs,
        on_room: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._model_name = model_name
        self._retention_ms = retention_ms
        self._redis = redis_client
        self._keys = keys
        self._scripts = scripts
        self._tokenizer = tokenizer
        self._engine = engine
        self._info = info
        self._jobs = jobs
        self._on_room = on_room
        self._generations: dict[str, Generation] = {}
        self._preparations: set[asyncio.Task[None]] = set()
        self._publisher: Publisher | None = None

    def connect(self, publisher: Publisher) -> None:
        """Set where results go; the publisher and the dispatcher need each other."""
        self._publisher = publisher

    def take(self, claimed: ClaimedJob, lease_s: float) -> None:
        """Accept a claimed job, whose lease began with this call at the latest."""
        if (old := self._jobs.get(claimed.job_id)) is not None:
            self.lose(old, "the server lost the claim and gave the job out again")
        now = time.monotonic()
        job = RunningJob(
            id=claimed.job_id,
            epoch=claimed.epoch,
            lane=claimed.lane,
            attempts=claimed.attempts,
            queued_ms=claimed.queued_ms,
            reserved=self._jobs.round_up(min(claimed.cost, self._info.max_model_len)),
            claimed_at=now,
            lease_until=now + lease_s,
            deadline=None
            if claimed.deadline_in_ms is None
            else now + claimed.deadline_in_ms / 1000,
            acknowledged=claimed.published,
            inherited=claimed.published,
        )
        self._jobs.add(job)
        logger.info("← claimed", job_id=job.id, attempt=job.attempts, resumed_at=job.inherited)
        task = asyncio.create_task(self._prepare(job, claimed.payload))
        self._preparations.add(task)
        task.add_done_callback(self._preparations.discard)

    async def _prepare(self, job: RunningJob, payload: bytes) -> None:
        try:
            message = _decode(job.id, payload)
            if message.model not in (None, self._model_name):
                raise InvalidRequestError(
                    f"{message.model!r} is not served on this queue; {self._model_name!r} is",
                    field="model",
                    code=ErrorCode.MODEL_NOT_FOUND,
                )
            prepared = await asyncio.to_thread(
                prepare_request,
                message.prompt,
                message.params,
                self._tokenizer,
                max_model_len=self._info.max_model_len,
                vocab_size=self._info.vocab_size,
                now=datetime.fromtimestamp(message.created_ms / 1000, UTC),
            )
            if job.inherited:
                job.log = await read_published(self._redis, self._keys, job.id, job.inherited)
            if job in self._jobs and not job.is_finished:
                await self._begin(job, prepared)
        except InvalidRequestError as error:
            self._fail(job, error.info)
        except DecodeError as error:
            await self._reject(job, error)
        except (ServerLost, QueueFull) as error:
            self.lose(job, str(error))
        except Exception as error:  # the job must end, whatever is wrong with us
            logger.exception("preparing a job failed", job_id=job.id)
            self._fail(job, ErrorInfo(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))

    async def _begin(self, job: RunningJob, prepared: PreparedRequest) -> None:
        """Hand a prepared job to the engine, or back to the queue if it does not fit after all."""
        budget = prepared.max_tokens
        exact = len(prepared.prompt_token_ids) + budget
        grows_by = self._jobs.round_up(exact) - job.reserved
        if grows_by > self._jobs.free_tokens and len(self._jobs) > 1:
            await self.hand_back([job], cost=exact)
            return
        self._jobs.reserve(job, exact)
        self._on_room()
        generation = Generation(
            job=job,
            text=OutputText(self._tokenizer, prepared.params),
            prompt_tokens=len(prepared.prompt_token_ids),
        )
        # Replaying rebuilds the state; the text it releases was published with the tokens.
        replayed = generation.text.append(job.log.token_ids)
        self._generations[_request_id(job)] = generation
        if replayed.stop is not None:
            self._finish(generation, FinishReason.STOP, replayed.stop)
            return
        self._engine.add(
            _request_id(job),
            prepared.prompt_token_ids,
            job.log.token_ids,
            prepared.params,
            LANE_PRIORITY[job.lane],
        )
        try:
            await self._scripts.recost(
                self._worker,
                job.id,
                job.epoch,
                prompt_tokens=len(prepared.prompt_token_ids),
                budget=budget,
            )
        except (ServerLost, QueueFull) as error:
            logger.warning("counters not corrected", job_id=job.id, error=str(error))

    async def _reject(self, job: RunningJob, error: DecodeError) -> None:
        """End a job that is no job, with a dead letter for whoever looks after the queue."""
        code = (
            ErrorCode.UNSUPPORTED_VERSION
            if isinstance(error, ProtocolVersionError)
            else ErrorCode.UNDECODABLE
        )
        try:
            await self._scripts.reject(
                self._worker,
                job.id,
                job.epoch,
                code=code,
                message=str(error),
                retention_ms=self._retention_ms,
            )
        except (ServerLost, QueueFull) as lost:
            self.lose(job, str(lost))
            return
        logger.warning("⊘ dead letter", job_id=job.id, why=str(error))
        self._drop(job)

    def receive(self, outputs: Sequence[EngineOutput]) -> None:
        """Take what the engine generated: text is made of it, and it is published."""
        for output in outputs:
            generation = self._generations.get(output.request_id)
            if generation is not None:
                self._receive_one(generation, output)

    def _receive_one(self, generation: Generation, output: EngineOutput) -> None:
        job = generation.job
        generation.cached_tokens = output.num_cached_tokens
        if output.token_ids and generation.first_token_at is None:
            generation.first_token_at = time.monotonic()
        step = generation.text.append(
            output.token_ids, ends_on_token=output.finish_reason is FinishReason.STOP
        )
        logprobs = output.logprobs or (None,) * len(output.token_ids)
        for token_id, piece, logprob in zip(
            output.token_ids, step.text_pieces, logprobs, strict=False
        ):
            job.log.append(token_id, piece, logprob)
        if step.stop is not None:
            if output.finish_reason is None:
                self._engine.abort([output.request_id])
            self._finish(generation, FinishReason.STOP, step.stop)
        elif output.error is not None:
            self._finish(generation, FinishReason.ERROR, error=output.error)
        elif output.finish_reason is not None:
            self._finish(generation, output.finish_reason, output.stop_reason)
        else:
            self._publish(job)

    def cancel(self, job: RunningJob) -> None:
        """End a job because its producer asked for it."""
        self._end_early(job, FinishReason.CANCELLED)

    def expire(self, job: RunningJob) -> None:
        """End a job because its deadline has passed."""
        self._end_early(job, FinishReason.EXPIRED)

    def lose(self, job: RunningJob, why: str) -> None:
        """Forget a job that is no longer ours; nothing more of it may be published."""
        if job in self._jobs:
            logger.warning("↻ lost", job_id=job.id, why=why)
        self._drop(job)

    def published(self, job: RunningJob) -> None:
        """Forget a job whose terminal event the server has."""
        assert job.terminal is not None
        elapsed_ms = round((time.monotonic() - job.claimed_at) * 1000)
        logger.info(
            "● done",
            job_id=job.id,
            ms=elapsed_ms,
            reason=job.terminal.finish_reason.value,
            tokens=len(job.log.token_ids),
        )
        self._drop(job)

    async def hand_back(self, jobs: Sequence[RunningJob], cost: int | None = None) -> None:
        """Give jobs back to the queue at their published offset, claimable at once."""
        for job in jobs:
            self._stop_generating(job)
        if self._publisher is not None:
            await self._publisher.flushed()
        held = [job for job in jobs if job in self._jobs]
        await self._scripts.release(self._worker, [(job.id, job.epoch, cost) for job in held])
        for job in held:
            logger.info("→ handed back", job_id=job.id, offset=job.acknowledged)
            self._drop(job)

    def _end_early(self, job: RunningJob, reason: FinishReason) -> None:
        generation = self._generations.get(_request_id(job))
        self._engine.abort([_request_id(job)])
        if generation is not None:
            self._finish(generation, reason)
        elif not job.is_finished:
            self._end(job, Terminal(finish_reason=reason, attempts=job.attempts))

    def _fail(self, job: RunningJob, error: ErrorInfo) -> None:
        if job in self._jobs and not job.is_finished:
            self._end(
                job,
                Terminal(
                    finish_reason=FinishReason.ERROR,
                    timings=Timings(queued_ms=job.queued_ms),
                    attempts=job.attempts,
                    error=error,
                ),
            )

    def _finish(
        self,
        generation: Generation,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        job = generation.job
        del self._generations[_request_id(job)]
        now = time.monotonic()
        first = generation.first_token_at or now
        job.log.tail = generation.text.finish()
        if generation.text.stop is not None:  # it may complete in the last character released
            reason, stop_reason = FinishReason.STOP, generation.text.stop
        job.log.finish_reason = reason
        job.log.stop_reason = stop_reason
        self._end(
            job,
            Terminal(
                finish_reason=reason,
                usage=Usage(
                    prompt_tokens=generation.prompt_tokens,
                    cached_tokens=generation.cached_tokens,
                    completion_tokens=len(job.log.token_ids),
                ),
                timings=Timings(
                    queued_ms=job.queued_ms,
                    prefill_ms=round((first - job.claimed_at) * 1000),
                    decode_ms=round((now - first) * 1000),
                ),
                attempts=job.attempts,
                error=error,
            ),
        )

    def _end(self, job: RunningJob, terminal: Terminal) -> None:
        job.terminal = terminal
        self._jobs.reserve(job, 0)  # the engine has freed its blocks already
        self._on_room()
        self._publish(job)

    def _publish(self, job: RunningJob) -> None:
        assert self._publisher is not None
        if job in self._jobs and job.is_dirty:
            self._publisher.mark_dirty(job)

    def _stop_generating(self, job: RunningJob) -> None:
        if self._generations.pop(_request_id(job), None) is not None:
            self._engine.abort([_request_id(job)])

    def _drop(self, job: RunningJob) -> None:
        self._stop_generating(job)
        if self._publisher is not None:
            self._publisher.forget(job)
        self._jobs.remove(job)
        self._on_room()


def _request_id(job: RunningJob) -> str:
    """Name the job in the engine: what an earlier claim left in the pipe is not its own."""
    return f"{job.id}:{job.epoch}"


def _decode(job_id: str, payload: bytes) -> Job:
    message = Job.decode(payload)
    if message.id != job_id:
        raise DecodeError(f"the payload is of job {message.id}", payload)
    return message
