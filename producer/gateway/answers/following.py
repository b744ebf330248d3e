"""The events of a response's jobs as they come, with bounded waiting and bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from enum import Enum, auto
from typing import Final

from inferq.producer import AsyncClient, StreamEvent, TokenStream
from inferq.protocol.errors import InferqError, ResultTimeout
from inferq.protocol.task_ends import end_tasks

#: Most events that are taken at once.
MOST_AT_ONCE: Final = 32


class _End(Enum):
    """Stands for the end of a source."""

    OF_ONE = auto()


async def follow(
    client: AsyncClient, job_id: str, *, keep_alive_s: float, idle_s: float, seen: int = 0
) -> AsyncGenerator[list[StreamEvent], None]:
    """Yield the job's events from the first on, all that are there together.

    An empty list when none came for `keep_alive_s` seconds. An event that brings the token at
    `seen` together with earlier ones comes in two. Raises what `TokenStream` raises, and
    `ResultTimeout` when nothing came for `idle_s` seconds.
    """
    pause_s = min(keep_alive_s, idle_s)
    stream = client.stream(job_id, timeout_s=pause_s)
    async with aclosing(_patiently(stream, pause_s, idle_s)) as batches:
        async for events in batches:
            cut = _num_before(events, seen)
            if cut < len(events):
                break
            yield events
        else:
            return
    if cut:
        yield events[:cut]
    async with aclosing(
        _patiently(client.stream(job_id, from_offset=seen, timeout_s=pause_s), pause_s, idle_s)
    ) as batches:
        is_first = True
        async for rest in batches:
            if is_first and rest:
                is_first = False
                yield [_before(events[cut], rest[0])]
            yield rest


def _num_before(events: Sequence[StreamEvent], seen: int) -> int:
    """Return how many events come before the one that brings the token at `seen` with others."""
    if not seen:
        return len(events)
    cut = (i for i, e in enumerate(events) if _start(e) < seen < e.next_offset)
    return next(cut, len(events))


def _start(event: StreamEvent) -> int:
    """Return the tokens of all outputs before an event."""
    return event.next_offset - len(event.token_ids)


def _before(whole: StreamEvent, rest: StreamEvent) -> StreamEvent:
    """Return what an event brings before its last part, which is `rest`."""
    count = rest.offset - whole.offset
    return replace(
        whole,
        token_ids=whole.token_ids[:count],
        text=whole.text[: len(whole.text) - len(rest.text)],
        logprobs=None if whole.logprobs is None else whole.logprobs[:count],
        finish_reason=None,
        stop_reason=None,
        usage=None,
        next_offset=_start(rest),
        cumulative_logprob=None,
    )


async def _patiently(
    stream: TokenStream, pause_s: float, idle_s: float
) -> AsyncGenerator[list[StreamEvent], None]:
    silent_s = 0.0
    async with stream:
        while True:
            try:
                events = [await anext(stream)]
            except StopAsyncIteration:
                return
            except ResultTimeout:
                silent_s += pause_s
                if silent_s >= idle_s:
                    raise ResultTimeout(stream.job_id, idle_s) from None
                yield []
                continue
            silent_s = 0.0
            failure = _take_ready(stream, events)
            yield events
            if failure is not None:
                raise failure


def _take_ready(stream: TokenStream, events: list[StreamEvent]) -> Exception | None:
    """Add what is there already; return what went wrong after that."""
    try:
        while len(events) < MOST_AT_ONCE and (event := stream.ready()) is not None:
            events.append(event)
    except InferqError as error:
        return error
    return None


async def merge(
    sources: Sequence[AsyncGenerator[list[StreamEvent], None]],
) -> AsyncGenerator[tuple[int, list[StreamEvent]], None]:
    """Yield what several sources yield, each with the number of its source, as it comes.

    Holds one list of each at most. The first error of any of them ends it.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for events in source:
                yield 0, events
        return
    ready: asyncio.Queue[tuple[int, list[StreamEvent] | Exception | _End]]
    ready = asyncio.Queue(maxsize=1)

    async def pump(number: int) -> None:
        try:
            async with aclosing(sources[number]) as source:
                async for events in source:
                    await ready.put((number, events))
        except Exception as error:  # noqa: BLE001 - raised where the events are read
            await ready.put((number, error))
        else:
            await ready.put((number, _End.OF_ONE))

    pumps = [asyncio.create_task(pump(number)) for number in range(len(sources))]
    left = len(pumps)
    try:
        while left:
            number, item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if isinstance(item, _End):
                left -= 1
            else:
                yield number, item
    finally:
        await end_tasks(pumps)
