"""The producer's client for plain code: `AsyncClient` on a private event loop."""

from __future__ import annotations

import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from redis.asyncio import Redis

from inferq.producer.async_client import (
    DEFAULT_RECONNECT_S,
    DEFAULT_RESULT_TIMEOUT_S,
    DEFAULT_RETENTION_S,
    DEFAULT_STREAM_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    DEFAULT_TOKENIZE_TIMEOUT_S,
    AsyncClient,
)
from inferq.producer.loop_thread import LoopThread
from inferq.producer.prompt import PromptInput, PromptOptions
from inferq.producer.result import JobResult, TokenizedPrompt
from inferq.producer.stream import StreamEvent, TokenStream
from inferq.producer.tracing import current_trace
from inferq.producer.workers import WorkerInfo
from inferq.protocol.errors import InferqError
from inferq.protocol.keys import Lane, partition_of
from inferq.protocol.messages import Terminal
from inferq.protocol.params import SamplingParams
from inferq.protocol.prompt_inputs import ChatInput
from inferq.protocol.replies import CancelOutcome, JobStatus, QueueLength
from inferq.protocol.trace_context import TraceContext
from inferq.protocol.webhooks import Webhook

T = TypeVar("T")


class _Backend:
    """What one process needs: an asyncio client, and the loop that it lives on."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.loop = LoopThread(client.aclose)


class Client:
    """A client of one queue, for plain (also threaded) code; arguments as for `AsyncClient`.

    Works where an event loop runs already (Jupyter), and in children made by fork, each of which
    gets connections of its own. Use as `with Client() as client:`, or call `close`.
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
        def make() -> AsyncClient:
            return AsyncClient(
                url,
                queue,
                partitions=partitions,
                queue_limit=queue_limit,
                retention_s=retention_s,
                timeout_s=timeout_s,
                reconnect_s=reconnect_s,
            )

        self._make = make
        # by process id; a parent's backend stays referenced, so that a child never closes it
        self._backends = {os.getpid(): _Backend(make())}
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _stop_own, self._backends)

    def __repr__(self) -> str:
        return repr(self._backend.client).removeprefix("Async")

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self._backend.client.queue

    def submit(
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
    ) -> JobHandle:
        """Put a job into the queue and return its handle; see `AsyncClient.submit`."""
        # here, as the loop's thread has a context of its own
        trace = current_trace() if trace_context is None else trace_context
        handle = self._run(
            lambda client: client.submit(
                prompt,
                params,
                messages=messages,
                lane=lane,
                deadline_s=deadline_s,
                not_before=not_before,
                delay_s=delay_s,
                idempotency_key=idempotency_key,
                metadata=metadata,
                model=model,
                cache_salt=cache_salt,
                return_prompt_token_ids=return_prompt_token_ids,
                note=note,
                webhook=webhook,
                trace_context=trace,
                **prompt_options,
            )
        )
        return JobHandle(self, handle.id, created=handle.created)

    def tokenize(
        self,
        prompt: PromptInput | None = None,
        *,
        messages: Sequence[ChatInput] | None = None,
        model: str | None = None,
        lane: str = Lane.HIGH,
        timeout_s: float = DEFAULT_TOKENIZE_TIMEOUT_S,
        **prompt_options: Unpack[PromptOptions],
    ) -> TokenizedPrompt:
        """Return a prompt's token ids; see `AsyncClient.tokenize`."""
        return self._run(
            lambda client: client.tokenize(
                prompt,
                messages=messages,
                model=model,
                lane=lane,
                timeout_s=timeout_s,
                **prompt_options,
            )
        )

    def job(self, job_id: str) -> JobHandle:
        """Return a handle for a job submitted before, here or elsewhere, without asking for it."""
        partition_of(job_id)
        return JobHandle(self, job_id)

    def find_job(self, idempotency_key: str) -> JobHandle | None:
        """Return a handle for the job that a key led to; see `AsyncClient.find_job`."""
        found = self._run(lambda client: client.find_job(idempotency_key))
        return None if found is None else JobHandle(self, found.id)

    def ping(self) -> None:
        """Raise `ServerLost` unless the server is there and lets us in."""
        self._run(lambda client: client.ping())

    def queue_length(self) -> QueueLength:
        """Return how many jobs wait and run; see `AsyncClient.queue_length`."""
        return self._run(lambda client: client.queue_length())

    def run(self, operation: Callable[[Redis], Awaitable[T]], *, slot_key: str) -> T:
        """Perform an operation of the caller's own; see `AsyncClient.run`."""
        return self._run(lambda client: client.run(operation, slot_key=slot_key))

    def workers(self) -> list[WorkerInfo]:
        """Return the last report of every worker of the queue; see `AsyncClient.workers`."""
        return self._run(lambda client: client.workers())

    def cancel(self, job_id: str) -> CancelOutcome:
        """See `AsyncJobHandle.cancel`."""
        return self._run(lambda client: client.cancel(job_id))

    def status(self, job_id: str) -> JobStatus:
        """See `AsyncJobHandle.status`."""
        return self._run(lambda client: client.status(job_id))

    def stream(
        self,
        job_id: str,
        *,
        from_offset: int = 0,
        timeout_s: float = DEFAULT_STREAM_TIMEOUT_S,
        total_timeout_s: float | None = None,
    ) -> JobStream:
        """See `AsyncClient.stream`."""
        backend = self._backend
        stream = backend.client.stream(
            job_id,
            from_offset=from_offset,
            timeout_s=timeout_s,
            total_timeout_s=total_timeout_s,
        )
        return JobStream(self, backend.loop, stream)

    def result(self, job_id: str, *, timeout_s: float = DEFAULT_RESULT_TIMEOUT_S) -> JobResult:
        """See `AsyncJobHandle.result`."""
        return self._run(lambda client: client.job(job_id).result(timeout_s=timeout_s))

    def close(self) -> None:
        """Close all connections; calls and streams in use end with an error, jobs go on."""
        self._is_closed = True
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _backend(self) -> _Backend:
        process = os.getpid()
        backend = self._backends.get(process)
        if backend is None:
            # setdefault is atomic: of several threads' backends one wins, none has begun to connect
            backend = self._backends.setdefault(process, _Backend(self._make()))
        return backend

    def _run(self, work: Callable[[AsyncClient], Coroutine[Any, Any, T]]) -> T:
        if self._is_closed:
            raise InferqError("this client is closed")
        backend = self._backend
        return backend.loop.run(lambda: work(backend.client))


class JobHandle:
    """One job: its id, and what can be done about it; see `AsyncJobHandle`."""

    def __init__(self, client: Client, job_id: str, *, created: bool = False) -> None:
        self.id = job_id
        self.created = created
        self._client = client

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def stream(
        self, from_offset: int = 0, *, timeout_s: float = DEFAULT_STREAM_TIMEOUT_S
    ) -> JobStream:
        """Iterate over the job's events from a token offset on; see `AsyncJobHandle.stream`."""
        return self._client.stream(self.id, from_offset=from_offset, timeout_s=timeout_s)

    def result(self, *, timeout_s: float = DEFAULT_RESULT_TIMEOUT_S) -> JobResult:
        """Wait for the end of the job and return all of it; see `AsyncJobHandle.result`."""
        return self._client.result(self.id, timeout_s=timeout_s)

    def cancel(self) -> CancelOutcome:
        """Ask for the job's end; see `AsyncJobHandle.cancel`."""
        return self._client.cancel(self.id)

    def status(self) -> JobStatus:
        """Return where the job stands; raise `JobNotFound` if the server does not know it."""
        return self._client.status(self.id)


class JobStream:
    """An iterator over the events of one job, once; see `TokenStream` for end and errors."""

    def __init__(self, client: Client, loop: LoopThread, stream: TokenStream) -> None:
        self._client = client  # keeps the loop alive while only the stream is held
        self._loop = loop
        self._stream = stream

    @property
    def job_id(self) -> str:
        """The job's id."""
        return self._stream.job_id

    @property
    def next_offset(self) -> int:
        """What to pass as `from_offset` to go on from here."""
        return self._stream.next_offset

    @property
    def terminal(self) -> Terminal | None:
        """How the job ended (usage, timings, attempts), once it has."""
        return self._stream.terminal

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamEvent:
        event = self._loop.run(self._next)
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        """Stop following, and end whatever iterates, from any thread; the job itself goes on."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _next(self) -> StreamEvent | None:
        return await anext(self._stream, None)


def _stop_own(backends: dict[int, _Backend]) -> None:
    """Stop this process's loop; those of a parent are not ours to touch."""
    backend = backends.get(os.getpid())
    if backend is not None:
        backend.loop.stop()
