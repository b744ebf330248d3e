"""The events of a response's jobs as they come, with bounded waiting and bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from enum import Enum, auto

from inferq.producer import AsyncClient, StreamEvent, TokenStream
from inferq.producer.server import end_tasks
from inferq.protocol.errors import ResultTimeout


class _End(Enum):
    """Stands for the end of a source."""

    OF_ONE = auto()


async def follow(
    client: AsyncClient, job_id: str, *, keep_alive_s: float, idle_s: float, seen: int = 0
) -> AsyncGenerator[StreamEvent | None, None]:
    """Yield the job's events from the first on; None when none came for `keep_alive_s` seconds.

    An event that brings the token at `seen` together with earlier ones comes in two. Raises what
    `TokenStream` raises, and `ResultTimeout` when nothing came for `idle_s` seconds.
    """
    pause_s = min(keep_alive_s, idle_s)
    stream = client.stream(job_id, timeout_s=pause_s)
    async with aclosing(_patiently(stream, pause_s, idle_s)) as events:
        async for event in events:
            if event is not None and _start(event) < seen < event.next_offset:
                break
            yield event
        else:
            return
    async with aclosing(
        _patiently(client.stream(job_id, from_offset=seen, timeout_s=pause_s), pause_s, idle_s)
    ) as events:
        is_first = True
        async for rest in events:
            if is_first and rest is not None:
                is_first = False
                yield _before(event, rest)
            yield rest


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
) -> AsyncGenerator[StreamEvent | None, None]:
    silent_s = 0.0
    async with stream:
        while True:
            try:
                event = await anext(stream)
            except StopAsyncIteration:
                return
            except ResultTimeout:
                silent_s += pause_s
                if silent_s >= idle_s:
                    raise ResultTimeout(stream.job_id, idle_s) from None
                yield None
            else:
                silent_s = 0.0
                yield event


async def merge(
    sources: Sequence[AsyncGenerator[StreamEvent | None, None]],
) -> AsyncGenerator[tuple[int, StreamEvent | None], None]:
    """Yield what several sources yield, each with the number of its source, as it comes.

    Holds one event of each at most. The first error of any of them ends it.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for event in source:
                yield 0, event
        return
    ready: asyncio.Queue[tuple[int, StreamEvent | Exception | _End | None]]
    ready = asyncio.Queue(maxsize=1)

    async def pump(number: int) -> None:
        try:
            async with aclosing(sources[number]) as source:
                async for event in source:
                    await ready.put((number, event))
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
