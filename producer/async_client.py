"""The producer's client for asyncio: submit jobs, follow their tokens, cancel."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from redis.asyncio import Redis

from inferq.producer.partitions import Partitions, choose_partition
from inferq.producer.probe import Probe
from inferq.producer.prompt import PromptInput, PromptOptions, to_prompt
from inferq.producer.reader import ReaderPool
from inferq.producer.request import (
    check_idempotency_key,
    check_note,
    check_seconds,
    check_trace_context,
    check_webhook,
    cost_bounds,
    make_job,
    to_lane,
    to_retention_ms,
    to_schedule,
)
from inferq.producer.result import JobResult, TokenizedPrompt, collect
from inferq.producer.server import RedisServer
from inferq.producer.stream import TokenStream
from inferq.producer.subscription import Subscription
from inferq.producer.tracing import current_trace
from inferq.producer.workers import WorkerInfo, read_workers
from inferq.protocol.errors import (
    InferqError,
    InvalidRequestError,
    JobExpired,
    JobNotFound,
    ResultTimeout,
)
from inferq.protocol.keys import Lane, partition_of
from inferq.protocol.messages import Job, Task
from inferq.protocol.params import SamplingParams
from inferq.protocol.prompt_inputs import ChatInput
from inferq.protocol.replies import CancelOutcome, JobStatus, QueueLength
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.trace_context import TraceContext
from inferq.protocol.webhooks import Webhook

T = TypeVar("T")

#: Most jobs, queued and running, before `submit` raises `QueueFull`.
DEFAULT_QUEUE_LIMIT: Final = 100_000
#: How long a finished job's events stay on the server, in seconds.
DEFAULT_RETENTION_S: Final = 3600.0
#: Longest time for one command, its retries included, in seconds.
DEFAULT_TIMEOUT_S: Final = 4.0
#: How long a stream rides out a server that is away, in seconds.
DEFAULT_RECONNECT_S: Final = 30.0
#: Longest wait for a tokenized prompt, in seconds.
DEFAULT_TOKENIZE_TIMEOUT_S: Final = 60.0
#: Longest wait between two events of a stream, and for a whole result, in seconds.
DEFAULT_STREAM_TIMEOUT_S: Final = 300.0
DEFAULT_RESULT_TIMEOUT_S: Final = 600.0


class AsyncClient:
    """A client of one queue, for one event loop; many tasks may use it at once.

    - `url`: `redis://`, `rediss://` (TLS) or `unix://`, with user and password where the server
      wants them; `redis+sentinel://host,host/service` or `redis+cluster://host,host` (`rediss+…`
      with TLS); None takes `$INFERQ_REDIS_URL`, or the local server.
    - `queue`: name of the queue; None takes `$INFERQ_QUEUE`, or `default`.
    - `partitions`: into how many parts the queue is split, each served by workers of its own and
      living in one Redis Cluster slot; None takes `$INFERQ_PARTITIONS`, or 1. All producers of a
      queue must say the same, or an idempotency key may not find its job.
    - `queue_limit`: most jobs in a partition before `submit` raises `QueueFull`; None takes
      `$INFERQ_QUEUE_LIMIT`, or 100 000.
    - `retention_s`: how long a finished job's events can be read, in seconds: at most ten years.
    - `timeout_s`: longest time for one command, with its retries, in seconds.
    - `reconnect_s`: how long a stream waits for a server that went away, in seconds.

    Connects at the first call. Use as `async with AsyncClient() as client:`, or call `aclose`.
    """

    def __init__(
        self,
        url: str | None = None,
        queue: str | None = None,
        *,
        partitions: int | None = None,
        queue_limit: int | None = None,
        retention_s: float = DEFAULT_RETENTION_S,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        reconnect_s: float = DEFAULT_RECONNECT_S,
    ) -> None:
        self._partitions = Partitions(
            url, queue, partitions, timeout_s=check_seconds("timeout_s", timeout_s)
        )
        self._readers = ReaderPool(reconnect_s=check_seconds("reconnect_s", reconnect_s))
        self._queue_limit = _to_queue_limit(queue_limit)
        self._retention_ms = to_retention_ms(retention_s)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._partitions.name!r}, queue={self.queue!r})"

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self._partitions.queue

    @property
    def connections(self) -> Partitions:
        """The connections to the queue's partitions, closed with the client."""
        return self._partitions

    async def submit(
        self,
        prompt: PromptInput | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[ChatInput] | None = None,
        lane: str = Lane.NORMAL,
        deadline_s: float | None = None,
        not_before: datetime | None = None,
        delay_s: float | None = None,
        idempotency_key: str | None = None,
        metadata: Mapping[str, str] | None = None,
        model: str | None = None,
        cache_salt: str | None = None,
        return_prompt_token_ids: bool = False,
        note: bytes | None = None,
        webhook: Webhook | None = None,
        trace_context: TraceContext | None = None,
        **prompt_options: Unpack[PromptOptions],
    ) -> AsyncJobHandle:
        """Put a job into the queue and return its handle; do not wait for a worker.

        - `prompt`: text, token ids, or chat messages (maps with `role` and `content`); or
          `messages` instead.
        - `prompt_options`: `add_special_tokens`, `tools`, `chat_template_kwargs`,
          `add_generation_prompt` and `continue_final_message`; see `PromptOptions`.
        - `lane`: `high`, `normal` or `low`.
        - `deadline_s`: the job ends as expired when it has not finished this many seconds from now.
        - `not_before`, or `delay_s` in seconds: start no sooner.
        - `idempotency_key`: a second submit with the same key and content returns the first job;
          with other content it raises `IdempotencyConflict`.
        - `metadata`: text by name, which travels with the job.
        - `model`: refuse the job if the worker serves another model.
        - `cache_salt`: share cached prompt beginnings only with jobs of the same salt.
        - `return_prompt_token_ids`: the result has the prompt's token ids too.
        - `note`: at most 4,096 bytes that the job's status shows as long as the server knows it.
        - `webhook`: whom `inferq tasks` tells of the job's end; a repeat keeps the first's.
        - `trace_context`: the span that the job is part of; None takes OpenTelemetry's current one
          where the program uses it.

        Raises `InvalidRequestError`, `QueueFull`, `IdempotencyConflict` or `ServerLost`. A lost
        reply is retried and never makes a second job.
        """
        check_idempotency_key(idempotency_key)
        check_note(note)
        check_webhook(webhook)
        check_trace_context(trace_context)
        job, digest = make_job(
            to_prompt(prompt, messages, **prompt_options),
            params,
            model=model,
            metadata=metadata,
            cache_salt=cache_salt,
            partition=choose_partition(self._partitions.number, idempotency_key),
            return_prompt_token_ids=return_prompt_token_ids,
            trace=trace_context or current_trace(),
        )
        chosen = to_lane(lane)
        deadline_ms, delay_ms = to_schedule(deadline_s, not_before, delay_s)
        return await self._enqueue(
            job,
            lane=chosen,
            deadline_ms=deadline_ms,
            delay_ms=delay_ms,
            idempotency_key=idempotency_key,
            digest=digest,
            note=note,
            webhook=webhook,
        )

    async def _enqueue(self, job: Job, **options: Any) -> AsyncJobHandle:
        scripts = self._scripts_of(job.id)
        prompt_tokens, budget = cost_bounds(job)
        enqueued = await self._server_of(job.id).call(
            lambda: scripts.enqueue(
                job,
                prompt_tokens=prompt_tokens,
                budget=budget,
                queue_limit=self._queue_limit,
                retention_ms=self._retention_ms,
                **options,
            )
        )
        # a retry after a lost reply finds the job that the first try made
        created = enqueued.created or enqueued.job_id == job.id
        return AsyncJobHandle(self, enqueued.job_id, created=created)

    async def tokenize(
        self,
        prompt: PromptInput | None = None,
        *,
        messages: Sequence[ChatInput] | None = None,
        model: str | None = None,
        lane: str = Lane.HIGH,
        timeout_s: float = DEFAULT_TOKENIZE_TIMEOUT_S,
        **prompt_options: Unpack[PromptOptions],
    ) -> TokenizedPrompt:
        """Return a prompt's token ids, as a worker of the model makes them; no engine is needed.

        Arguments are those of `submit`. Is given up after `timeout_s` seconds with `ResultTimeout`.
        Raises what `submit` and `result` raise.
        """
        check_seconds("timeout_s", timeout_s)
        chosen = to_lane(lane)
        job, digest = make_job(
            to_prompt(prompt, messages, **prompt_options),
            None,
            model=model,
            partition=choose_partition(self._partitions.number, None),
            task=Task.TOKENIZE,
            trace=current_trace(),
        )
        deadline_ms, _ = to_schedule(timeout_s, None, None)
        handle = await self._enqueue(job, lane=chosen, deadline_ms=deadline_ms, digest=digest)
        try:
            result = await handle.result(timeout_s=timeout_s)
        except JobExpired:
            raise ResultTimeout(job.id, timeout_s) from None
        scripts = self._scripts_of(job.id)
        await self._server_of(job.id).call(lambda: scripts.forget(job.id))
        texts = tuple(result.token_texts[token_id] for token_id in result.token_ids)
        return TokenizedPrompt(result.token_ids, result.text, texts)

    def job(self, job_id: str) -> AsyncJobHandle:
        """Return a handle for a job submitted before, here or elsewhere, without asking for it."""
        partition_of(job_id)
        return AsyncJobHandle(self, job_id)

    async def find_job(self, idempotency_key: str) -> AsyncJobHandle | None:
        """Return a handle for the job that an idempotency key led to; None if there is no such job.

        Raises `InvalidRequestError` for what can be no key, and `ServerLost`.
        """
        self._check_open()
        check_idempotency_key(idempotency_key)
        partition = choose_partition(self._partitions.number, idempotency_key)
        scripts = self._partitions.scripts(partition)
        job_id = await self._partitions.server(partition).call(
            lambda: scripts.find(idempotency_key)
        )
        return None if job_id is None else self.job(job_id)

    async def ping(self) -> None:
        """Raise `ServerLost` unless the server is there and lets us in."""
        self._check_open()
        for partition in range(self._partitions.number):
            await self._partitions.server(partition).ping()

    async def queue_length(self) -> QueueLength:
        """Return how many jobs wait and run, and how many ever ended."""
        self._check_open()
        partitions = self._partitions
        limit = self._queue_limit
        parts = await asyncio.gather(
            *(
                partitions.server(partition).call(
                    functools.partial(partitions.scripts(partition).length, limit=limit)
                )
                for partition in range(partitions.number)
            )
        )
        return functools.reduce(QueueLength.joined, parts)

    async def run(self, operation: Callable[[Redis], Awaitable[T]], *, slot_key: str) -> T:
        """Perform an operation of the caller's own on this client's connections.

        `operation` gets redis's client, which does not decode responses, and may touch keys with
        `slot_key`'s hash tag. A lost reply repeats it, so twice must be as good as once. Raises
        `ServerLost` or `QueueFull`, within the client's `timeout_s`.
        """
        self._check_open()
        server = self._partitions.server_of(slot_key)
        return await server.call(lambda: operation(server.commands))

    async def workers(self) -> list[WorkerInfo]:
        """Return the last report of every worker of the queue, by partition and name."""
        self._check_open()
        partitions = self._partitions
        reports = await asyncio.gather(
            *(
                read_workers(partitions.server(partition), partitions.scripts(partition))
                for partition in range(partitions.number)
            )
        )
        return [worker for report in reports for worker in report]

    async def cancel(self, job_id: str) -> CancelOutcome:
        """See `AsyncJobHandle.cancel`."""
        scripts = self._scripts_of(job_id)
        outcome = await self._server_of(job_id).call(
            lambda: scripts.cancel(job_id, retention_ms=self._retention_ms)
        )
        if outcome is CancelOutcome.UNKNOWN:
            raise JobNotFound(job_id)
        return outcome

    async def status(self, job_id: str) -> JobStatus:
        """See `AsyncJobHandle.status`."""
        scripts = self._scripts_of(job_id)
        status = await self._server_of(job_id).call(lambda: scripts.status(job_id))
        if status is None:
            raise JobNotFound(job_id)
        return status

    def stream(
        self,
        job_id: str,
        *,
        from_offset: int = 0,
        timeout_s: float = DEFAULT_STREAM_TIMEOUT_S,
        total_timeout_s: float | None = None,
    ) -> TokenStream:
        """See `AsyncJobHandle.stream`."""
        self._check_open()
        return TokenStream(
            self._follow,
            job_id,
            from_offset=from_offset,
            idle_timeout_s=check_seconds("timeout_s", timeout_s),
            total_timeout_s=total_timeout_s,
        )

    async def aclose(self) -> None:
        """Close all connections; calls and streams in use end with an error, jobs go on."""
        self._is_closed = True
        await self._readers.aclose()
        await self._partitions.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _follow(self, job_id: str, from_total: int) -> Subscription:
        self._check_open()
        server = self._server_of(job_id)
        await server.greet()
        subscription = Subscription(job_id, from_total)
        scripts = self._scripts_of(job_id)
        probe = Probe(server, scripts, retention_ms=self._retention_ms)
        self._readers.follow(subscription, server, scripts.keys, probe)
        return subscription

    def _server_of(self, job_id: str) -> RedisServer:
        """Return the server of the partition that the job lives in."""
        self._check_open()
        return self._partitions.server(partition_of(job_id))

    def _scripts_of(self, job_id: str) -> QueueScripts:
        """Return the operations of the partition that the job lives in."""
        self._check_open()
        return self._partitions.scripts(partition_of(job_id))

    def _check_open(self) -> None:
        if self._is_closed:
            raise InferqError("this client is closed")


def _to_queue_limit(given: int | None) -> int:
    """Return the limit given, else the environment's, else the default, if it is one."""
    field, value = "queue_limit", given
    if value is None:
        field, text = "INFERQ_QUEUE_LIMIT", os.environ.get("INFERQ_QUEUE_LIMIT")
        if text is None:
            return DEFAULT_QUEUE_LIMIT
        value = int(text) if text.isascii() and text.isdigit() else 0
        given_as = text or "empty"
    else:
        given_as = repr(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequestError(f"must be a whole number from 1 on, not {given_as}", field=field)
    return value


class AsyncJobHandle:
    """One job: its id, and what can be done about it.

    `created` is False where an idempotency key led to a job that was there before.
    """

    def __init__(self, client: AsyncClient, job_id: str, *, created: bool = False) -> None:
        self.id = job_id
        self.created = created
        self._client = client

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def stream(
        self, from_offset: int = 0, *, timeout_s: float = DEFAULT_STREAM_TIMEOUT_S
    ) -> TokenStream:
        """Iterate over the job's events from a token offset on (an event's `next_offset`).

        `timeout_s` is the longest wait for the next event, in seconds; see `TokenStream` for the
        errors. Leaving early does not cancel the job. Raises `InvalidRequestError` for an offset
        that is no whole number in [0, 2**63).
        """
        return self._client.stream(self.id, from_offset=from_offset, timeout_s=timeout_s)

    async def result(self, *, timeout_s: float = DEFAULT_RESULT_TIMEOUT_S) -> JobResult:
        """Wait for the end of the job, at most `timeout_s` seconds, and return all of it.

        Raises what `stream` raises; after `ResultTimeout` the job goes on, and one may ask again.
        """
        check_seconds("timeout_s", timeout_s)
        stream = self._client.stream(self.id, timeout_s=timeout_s, total_timeout_s=timeout_s)
        return await collect(stream)

    async def cancel(self) -> CancelOutcome:
        """Ask for the job's end; raise `JobNotFound` if the server does not know it.

        Returns `cancelled` (it had not begun), `requested` (its worker will end it within a step)
        or `finished` (it was over before).
        """
        return await self._client.cancel(self.id)

    async def status(self) -> JobStatus:
        """Return where the job stands; raise `JobNotFound` if the server does not know it."""
        return await self._client.status(self.id)
