"""A claimed job's way through the worker: decode, tokenize, generate, detokenize, publish, end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn, TypeVar

from inferq.protocol.errors import (
    DecodeError,
    ErrorCode,
    ErrorInfo,
    InvalidRequestError,
    ProtocolVersionError,
    QueueFull,
    ServerLost,
)
from inferq.protocol.keys import Lane
from inferq.protocol.messages import FinishReason, Job, Task, Terminal, Timings, Usage
from inferq.protocol.output_log import JobLog
from inferq.protocol.replies import ClaimedJob
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.task_ends import end_tasks
from inferq.worker.daemon_executor import DaemonExecutor
from inferq.worker.engine.requests.request import PreparedRequest
from inferq.worker.engine.requests.request_events import RequestEvent
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.jobs.books import JobBooks
from inferq.worker.jobs.generation import Generation
from inferq.worker.jobs.job_lines import JobLines
from inferq.worker.jobs.job_trace import JobTraces
from inferq.worker.jobs.preparation import Preparer
from inferq.worker.pipe.engine_client import EngineClient
from inferq.worker.pipe.engine_output import EngineOutput
from inferq.worker.queue.publisher import Publisher
from inferq.worker.queue.running import RunningJob, RunningJobs

#: Engine priority of each lane; smaller is more urgent.
LANE_PRIORITY = {Lane.HIGH: -1, Lane.NORMAL: 0, Lane.LOW: 1}
#: Most prompts that are tokenized at once: some more than there are cores, for the short ones
#: behind long ones.
MAX_TOKENIZING: Final = min(32, (os.cpu_count() or 1) + 4)

_Made = TypeVar("_Made")


@dataclass(slots=True)
class ActiveJob:
    """A job that is in the engine: its outputs so far, and what usage and timings are made of."""

    job: RunningJob
    generation: Generation
    prompt_tokens: int
    cached_tokens: int = 0
    first_token_at: float | None = None
    #: When the last tokens of each output came.
    grew_at: dict[int, float] = field(default_factory=dict)


class Dispatcher:
    """Moves jobs between the queue and the engine; every method runs on the event loop."""

    def __init__(
        self,
        *,
        worker: str,
        retention_ms: int,
        scripts: QueueScripts,
        preparer: Preparer,
        tokenizer: Tokenizer,
        engine: EngineClient,
        jobs: RunningJobs,
        books: JobBooks,
        traces: JobTraces,
        lines: JobLines,
        on_room: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._retention_ms = retention_ms
        self._scripts = scripts
        self._preparer = preparer
        self._tokenizer = tokenizer
        self._engine = engine
        self._jobs = jobs
        self._books = books
        self._traces = traces
        self._lines = lines
        self._on_room = on_room
        self._active: dict[str, ActiveJob] = {}
        self._threads = DaemonExecutor(MAX_TOKENIZING, "prepare")
        self._preparations: dict[RunningJob, asyncio.Task[None]] = {}
        self._orphaned = asyncio.Event()
        self._fault: BaseException | None = None
        self._publisher: Publisher | None = None

    def connect(self, publisher: Publisher) -> None:
        """Set where results go; the publisher and the dispatcher need each other."""
        self._publisher = publisher

    def take(self, claimed: ClaimedJob, *, sent_at: float, lease_s: float) -> None:
        """Accept a job whose claim was sent at `sent_at` of the monotonic clock."""
        if (old := self._jobs.get(claimed.job_id)) is not None:
            self.lose(old, "the server lost the claim and gave the job out again")
        now = time.monotonic()
        job = RunningJob(
            id=claimed.job_id,
            epoch=claimed.epoch,
            lane=claimed.lane,
            attempts=claimed.attempts,
            queued_ms=claimed.queued_ms,
            reserved=claimed.space,
            claimed_at=now,
            lease_until=sent_at + lease_s,
            deadline=None
            if claimed.deadline_in_ms is None
            else now + claimed.deadline_in_ms / 1000,
            acknowledged=claimed.published,
            inherited=claimed.published,
            runs_alone=claimed.runs_alone,
            is_errand=claimed.space == 0,
        )
        self._jobs.add(job)
        self._books.took(job)
        self._lines.claimed(job)
        task = asyncio.create_task(self._prepare(job, claimed.payload))
        self._preparations[job] = task
        task.add_done_callback(lambda task: self._prepared(job, task))

    async def run(self) -> NoReturn:
        """Raise whatever left a job here that nobody ends; run on until then."""
        await self._orphaned.wait()
        assert self._fault is not None
        raise self._fault

    async def close(self) -> None:
        """Prepare nothing any more; the jobs are left as they are."""
        await end_tasks(self._preparations.values())
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _prepared(self, job: RunningJob, task: asyncio.Task[None]) -> None:
        del self._preparations[job]
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fault = fault
            self._orphaned.set()

    async def _prepare(self, job: RunningJob, payload: bytes) -> None:
        try:
            await self._bring_to_engine(job, payload)
        except (asyncio.CancelledError, GeneratorExit):
            raise  # the job has ended or left, or we have
        except InvalidRequestError as error:
            self._fail(job, error.info)
        except (ServerLost, QueueFull) as error:
            self.lose(job, str(error))
        except BaseException as error:  # noqa: BLE001 - a panic of Rust's is no `Exception`
            self._break(job, "preparing a job failed", error)

    async def _bring_to_engine(self, job: RunningJob, payload: bytes) -> None:
        try:
            message = _decode(job.id, payload)
            self._traces.begin(job, message)
            self._lines.read(job, message)
            adapter = self._preparer.adapter_of(message.model)
            if message.task is Task.TOKENIZE:
                await self._tokenize(job, message)
                return
            began_ns = time.time_ns()
            prepared = await self._in_thread(self._preparer.prepare, message)
            if trace := self._traces.of(job):
                trace.tokenized(began_ns, len(prepared.prompt_token_ids))
            log = await self._preparer.published(job, prepared, message)
        except DecodeError as error:
            await self._reject(job, error)
            return
        if job in self._jobs and not job.is_finished:
            await self._begin(job, prepared, log, message.cache_salt or "", adapter)

    async def _tokenize(self, job: RunningJob, message: Job) -> None:
        """End a job that asks for its prompt's tokens with these, whatever was published of them.

        Any worker finds the same ones.
        """
        log = await self._in_thread(self._preparer.tokenize, message)
        if job in self._jobs and not job.is_finished:
            job.log = log
            self._end(
                job,
                Terminal(
                    finish_reason=FinishReason.STOP,
                    usage=Usage(prompt_tokens=log.total),
                    timings=Timings(queued_ms=job.queued_ms),
                    attempts=job.attempts,
                ),
            )

    async def _in_thread(self, make: Callable[[Job], _Made], message: Job) -> _Made:
        return await asyncio.get_running_loop().run_in_executor(self._threads, make, message)

    async def _begin(
        self,
        job: RunningJob,
        prepared: PreparedRequest,
        log: JobLog,
        cache_salt: str,
        adapter: str,
    ) -> None:
        """Hand a prepared job to the engine, or back to the queue if it does not fit after all."""
        prompt_tokens = len(prepared.prompt_token_ids)
        candidates = prepared.params.num_candidates
        exact = self._jobs.tokens_for(prompt_tokens, prepared.max_tokens, candidates)
        if exact - job.reserved > self._jobs.free_tokens and len(self._jobs) > 1:
            await self.hand_back([job], cost=exact)
            return
        job.is_errand = False
        bound = job.reserved
        self._jobs.reserve(job, exact)
        if job.reserved < bound:
            self._on_room()
        generation = Generation(self._tokenizer, prepared.params, log)
        if not prepared.params.publishes_at_end:
            job.log = log
        active = ActiveJob(job, generation, prompt_tokens)
        self._active[_request_id(job)] = active
        if generation.is_finished:
            self._finish(active)
            return
        trace = self._traces.of(job)
        if trace is not None:
            trace.begin_prefill()
        self._engine.add(
            _request_id(job),
            prepared.prompt_token_ids,
            prepared.params,
            resumed=[(output.token_ids, output.is_finished) for output in log.outputs]
            if log.total
            else (),
            priority=LANE_PRIORITY[job.lane],
            cache_salt=cache_salt,
            adapter=adapter,
            traced=trace is not None,
        )
        try:
            await self._scripts.recost(
                self._worker,
                job.id,
                job.epoch,
                prompt_tokens=prompt_tokens,
                budget=prepared.max_tokens * candidates,
            )
        except (ServerLost, QueueFull) as error:
            self._lines.not_corrected(job, error)

    async def _reject(self, job: RunningJob, error: DecodeError) -> None:
        """End a job that is no job, with a dead letter for whoever looks after the queue."""
        code = (
            ErrorCode.UNSUPPORTED_VERSION
            if isinstance(error, ProtocolVersionError)
            else ErrorCode.UNDECODABLE
        )
        await self._scripts.reject(
            self._worker,
            job.id,
            job.epoch,
            code=code,
            message=str(error),
            retention_ms=self._retention_ms,
        )
        self._books.rejected += 1
        self._lines.rejected(job, error)
        self._traces.fail(job, code)
        self._drop(job)

    def follow(self, events: Sequence[RequestEvent]) -> None:
        """Take what the engine says of requests that are traced."""
        for event in events:
            active = self._active.get(event.request_id)
            if active is not None and (trace := self._traces.of(active.job)):
                trace.follow(event)

    def receive(self, outputs: Sequence[EngineOutput]) -> None:
        """Take what the engine generated: text is made of it, and it is published."""
        now = time.monotonic()
        for output in outputs:
            active = self._active.get(output.request_id)
            if active is None:
                continue
            try:
                self._receive_one(active, output, now)
            except BaseException as error:  # noqa: BLE001 - a panic of Rust's is no `Exception`
                self._break(active.job, "taking tokens failed", error)

    def _receive_one(self, active: ActiveJob, output: EngineOutput, now: float) -> None:
        job = active.job
        if output.token_ids and active.first_token_at is None:
            active.first_token_at = now
            self._books.began(job, active.prompt_tokens, now)
            active.cached_tokens = output.num_cached_tokens
            job.has_started = True
            if trace := self._traces.of(job):
                trace.begin_decode(active.cached_tokens)
        if output.error is not None:
            self._finish_early(active, FinishReason.ERROR, output.error)
            return
        generation = active.generation
        grown = generation.log.outputs[output.index].token_ids
        before = len(grown)
        must_tell = generation.receive(output)
        if tokens := len(grown) - before:
            self._books.grew(tokens, active.grew_at.get(output.index), now)
            active.grew_at[output.index] = now
        if generation.is_finished:
            self._finish(active, abort=not output.request_finished)
            return
        if must_tell:
            self._engine.abort_output(output.request_id, output.index)
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
            self._books.lost += 1
            self._lines.lost(job, why)
            self._traces.leave(job, "lost")
        self._drop(job)

    def published(self, job: RunningJob) -> None:
        """Forget a job whose terminal event the server has."""
        assert job.terminal is not None
        now = time.monotonic()
        self._books.published(job, job.terminal.finish_reason, now)
        self._lines.done(job, now - job.claimed_at)
        self._traces.end(job, job.terminal)
        self._drop(job)

    async def hand_back(
        self, jobs: Sequence[RunningJob], *, cost: int | None = None, flush: bool = True
    ) -> None:
        """Give jobs back to the queue at their published offset, claimable at once.

        Without `flush`, tokens that are not published yet are left to be generated again.
        """
        for job in jobs:
            self._stop_work(job)
        if self._publisher is not None and flush:
            await self._publisher.flushed(jobs)
        held = [job for job in jobs if job in self._jobs]
        if not held:
            return
        await self._scripts.release(self._worker, [(job.id, job.epoch, cost) for job in held])
        for job in held:
            self._books.handed_back += 1
            self._lines.handed_back(job)
            self._traces.leave(job, "handed back")
            self._drop(job)

    def end_traces(self, event: str) -> None:
        """End the traces of all jobs here, as others go on with them."""
        for job in self._jobs:
            self._traces.leave(job, event)

    def _end_early(self, job: RunningJob, reason: FinishReason) -> None:
        active = self._active.get(_request_id(job))
        if active is not None:
            try:
                self._finish_early(active, reason)
            except BaseException as error:  # noqa: BLE001 - a panic of Rust's is no `Exception`
                self._break(job, "ending a job failed", error)
        elif not job.is_finished:
            self._stop_work(job)
            self._end(job, Terminal(finish_reason=reason, attempts=job.attempts))

    def _break(self, job: RunningJob, what: str, error: BaseException) -> None:
        """End a job for a fault of ours; the others go on."""
        self._lines.failed(what, job, error)
        self._stop_work(job)
        self._fail(job, ErrorInfo(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))

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

    def _finish(self, active: ActiveJob, *, abort: bool = False) -> None:
        """End a job all of whose outputs have ended."""
        self._stop_work(active.job, abort=abort)
        active.job.log = active.generation.result()
        self._end(active.job, self._terminal(active, active.job.log.finish_reason))

    def _finish_early(
        self, active: ActiveJob, reason: FinishReason, error: ErrorInfo | None = None
    ) -> None:
        self._stop_work(active.job, abort=error is None)
        active.generation.end_early(reason)
        self._end(active.job, self._terminal(active, reason, error))

    def _terminal(
        self, active: ActiveJob, reason: FinishReason, error: ErrorInfo | None = None
    ) -> Terminal:
        job = active.job
        now = time.monotonic()
        first = active.first_token_at or now
        return Terminal(
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=active.prompt_tokens,
                cached_tokens=active.cached_tokens,
                completion_tokens=job.log.total,
            ),
            timings=Timings(
                queued_ms=job.queued_ms,
                prefill_ms=round((first - job.claimed_at) * 1000),
                decode_ms=round((now - first) * 1000),
            ),
            attempts=job.attempts,
            error=error,
        )

    def _end(self, job: RunningJob, terminal: Terminal) -> None:
        job.terminal = terminal
        self._jobs.reserve(job, 0)  # the engine has freed its blocks already
        self._on_room()
        self._publish(job)
        if trace := self._traces.of(job):
            trace.end_generation()

    def _publish(self, job: RunningJob) -> None:
        assert self._publisher is not None
        if job in self._jobs and job.is_dirty:
            self._publisher.mark_dirty(job)

    def _stop_work(self, job: RunningJob, *, abort: bool = True) -> None:
        """Have nobody here go on with a job, nor bring it to the engine."""
        if self._active.pop(_request_id(job), None) is not None:
            if abort:
                self._engine.abort(_request_id(job))
            return
        preparation = self._preparations.get(job)
        if preparation is not None and preparation is not asyncio.current_task():
            preparation.cancel()

    def _drop(self, job: RunningJob) -> None:
        self._stop_work(job)
        self._traces.leave(job, "left")
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
