"""The events of one job as its producer sees them: each token once, in order, with a typed end."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NoReturn, Self

from inferq.producer.subscription import Entry, Subscription
from inferq.protocol.errors import (
    ErrorCode,
    ErrorInfo,
    InferqError,
    InvalidRequestError,
    JobCancelled,
    JobExpired,
    JobFailed,
    ResultTimeout,
    StreamGap,
)
from inferq.protocol.messages import (
    Event,
    FinishReason,
    Terminal,
    TokenLogprob,
    Usage,
)

#: Above all that a job can publish, and within the ids of the server's streams.
MAX_OFFSET: Final = 2**63 - 1

_UNEXPLAINED: Final = ErrorInfo(ErrorCode.INTERNAL, "the worker gave no reason")

#: Begins to follow a job from a total of tokens on.
Follow = Callable[[str, int], Awaitable[Subscription]]


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """Tokens and text that are new since the event before.

    `offset` counts the tokens of output `index` before this event; `next_offset` is what to pass
    as `from_offset` to go on after it: the tokens of all outputs so far. Outputs take turns.
    `finish_reason`, `stop_reason` and `cumulative_logprob` come with the last event of an output,
    `prompt_logprobs` and `prompt_token_ids` with the first of output 0, `usage` with the last event
    of the job. `token_texts` has the bytes of every token that the event names, where
    log-probabilities were asked for.
    """

    job_id: str
    index: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    usage: Usage | None
    next_offset: int
    cumulative_logprob: float | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    token_texts: Mapping[int, bytes] = field(default_factory=dict)
    prompt_token_ids: tuple[int, ...] | None = None


class TokenStream:
    """An asynchronous iterator over the events of one job, from an offset on; to be used once.

    Ends after the terminal event, whose content stays in `terminal`. Raises `JobFailed`,
    `JobCancelled` or `JobExpired` after what came before, `StreamExpired` when the events are gone,
    `JobNotFound` when the job is too and nothing was read from it, `ResultTimeout` when none comes
    for `idle_timeout_s` seconds (or the job has not ended after `total_timeout_s`), `ServerLost`
    when the server stays away, `JobError` when what the server has of the job cannot be read. After
    a time-out it can be used further. After `close` it ends, without an error and with `terminal`
    still None.
    """

    def __init__(
        self,
        follow: Follow,
        job_id: str,
        *,
        from_offset: int,
        idle_timeout_s: float,
        total_timeout_s: float | None = None,
    ) -> None:
        _check_offset(from_offset)
        self.job_id = job_id
        self.next_offset = from_offset
        self.terminal: Terminal | None = None
        self._follow = follow
        self._idle_timeout_s = idle_timeout_s
        self._total_timeout_s = total_timeout_s
        self._give_up_at: float | None = None
        self._has_seen_events = False
        self._subscription: Subscription | None = None
        self._ending: InferqError | None = None
        self._is_closed = False
        self._unfollow: Callable[[], object] = _nothing

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        while True:
            if self.terminal is not None:
                self._stop()
            if self._is_closed:
                raise StopAsyncIteration
            # what is there needs no time-out
            entry = self._ready_entry() or await self._next_entry()
            if entry is not None and (event := self._accept(entry)) is not None:
                return event

    def ready(self) -> StreamEvent | None:
        """Return the next event if it is there already; None too if the stream is over or closed.

        Raises `StreamGap` and `DecodeError` as iterating does; all other errors only iterating.
        """
        while self.terminal is None and (entry := self._ready_entry()) is not None:
            if (event := self._accept(entry)) is not None:
                return event
        return None

    def close(self) -> None:
        """Stop following, and end whatever iterates, from any thread; the job itself goes on."""
        self._is_closed = True
        self._unfollow()

    async def aclose(self) -> None:
        """Do what `close` does."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _stop(self) -> NoReturn:
        if self._ending is not None:
            raise self._ending
        raise StopAsyncIteration

    def _ready_entry(self) -> Entry | None:
        if self._subscription is None or self._is_closed:
            return None
        return self._subscription.get_nowait()

    async def _next_entry(self) -> Entry | None:
        clock = asyncio.get_running_loop().time
        give_up_at, timeout_s = clock() + self._idle_timeout_s, self._idle_timeout_s
        if self._total_timeout_s is not None:
            if self._give_up_at is None:
                self._give_up_at = clock() + self._total_timeout_s
            if self._give_up_at < give_up_at:
                give_up_at, timeout_s = self._give_up_at, self._total_timeout_s
        try:
            async with asyncio.timeout_at(give_up_at) as limit:
                if self._subscription is None:
                    self._subscription = await self._subscribe()
                return await self._subscription.get()
        except TimeoutError:
            if not limit.expired():
                raise
            raise ResultTimeout(self.job_id, timeout_s) from None
        except InferqError:
            self._unfollow()
            raise

    async def _subscribe(self) -> Subscription:
        subscription = await self._follow(self.job_id, self.next_offset)
        loop = asyncio.get_running_loop()
        # an abandoned iterator must not keep its place in a shared reader
        self._unfollow = weakref.finalize(self, _close_in, loop, subscription)
        if self._is_closed:  # meanwhile, when there was nothing to end yet
            self._unfollow()
        return subscription

    def _accept(self, entry: Entry) -> StreamEvent | None:
        """Return what an entry adds for the caller; None for nothing, or an end without tokens."""
        event = self._unseen(entry, Event.decode(entry.payload))
        if event is None:
            return None
        self._has_seen_events = True
        self.next_offset += len(event.token_ids)
        self.terminal = event.terminal
        if self.terminal is None:
            return self._visible(event)
        self._unfollow()
        self._ending = _error_of(self.job_id, self.terminal)
        if self._ending is None or event.token_ids or event.text:
            return self._visible(event)
        return None

    def _unseen(self, entry: Entry, event: Event) -> Event | None:
        """Return what `event` adds to what was seen, or None."""
        first = entry.total - len(event.token_ids)
        if first > self.next_offset:
            raise StreamGap(self.job_id, self.next_offset, first)
        if entry.total < self.next_offset and event.terminal is not None:
            self._check_end(entry.total)
        event = event.after(min(self.next_offset - first, len(event.token_ids)))
        return event if event.token_ids or event.terminal is not None else None

    def _check_end(self, total: int) -> None:
        """Refuse an offset that the caller made up: beyond all that the job ever published."""
        if not self._has_seen_events:
            raise InvalidRequestError(
                f"{self.next_offset} is beyond the job's end at {total}",
                field="from_offset",
                limit=total,
            )

    def _visible(self, event: Event) -> StreamEvent:
        terminal = event.terminal
        finish_reason = event.finish_reason
        if finish_reason is None and terminal is not None:
            finish_reason = terminal.finish_reason
        return StreamEvent(
            job_id=self.job_id,
            index=event.index,
            offset=event.offset,
            token_ids=event.token_ids,
            text=event.text,
            logprobs=event.logprobs,
            finish_reason=finish_reason,
            stop_reason=event.stop_reason,
            usage=None if terminal is None else terminal.usage,
            next_offset=self.next_offset,
            cumulative_logprob=event.cumulative_logprob,
            prompt_logprobs=event.prompt_logprobs,
            token_texts=event.token_texts,
            prompt_token_ids=event.prompt_token_ids,
        )


def _check_offset(value: int) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 0 <= value <= MAX_OFFSET:
        given = "" if is_whole else f", not {value!r}"  # a number may have thousands of digits
        raise InvalidRequestError(
            f"must be a whole number in [0, {MAX_OFFSET}]{given}",
            field="from_offset",
            limit=MAX_OFFSET if is_whole and value > 0 else 0,
        )


def _error_of(job_id: str, terminal: Terminal) -> InferqError | None:
    match terminal.finish_reason:
        case FinishReason.CANCELLED:
            return JobCancelled(job_id)
        case FinishReason.EXPIRED:
            return JobExpired(job_id)
        case FinishReason.ERROR:
            return JobFailed(job_id, terminal.error or _UNEXPLAINED)
        case _:
            return None


def _close_in(loop: asyncio.AbstractEventLoop, subscription: Subscription) -> None:
    """Close a subscription from any thread: the garbage collector runs where it likes."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits on it
        loop.call_soon_threadsafe(subscription.close)


def _nothing() -> None:
    """Close a stream that was never begun."""
