"""How streams end before their jobs do: closed, abandoned, or with their client."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from typing import Any

import pytest

from inferq.producer import AsyncClient, StreamEvent, TokenStream
from inferq.producer.subscription import Subscription
from inferq.protocol.errors import InferqError, JobCancelled
from inferq.protocol.messages import FinishReason, Terminal


async def read(stream: Any) -> list[StreamEvent]:
    return [event async for event in stream]


async def test_an_abandoned_stream_gives_its_place_back(
    client: AsyncClient, worker: Any, words: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    await worker.publish(claimed, 0, words(0, 1), words(1, 2))
    async for _ in handle.stream():
        break
    gc.collect()
    await asyncio.sleep(0.01)
    (reader,) = client._readers._readers[0]
    assert reader._count == 0
    assert reader._followers == {}


async def test_a_closed_stream_ends_also_for_who_waits_on_it(
    client: AsyncClient, worker: Any, words: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    await worker.publish(claimed, 0, words(0, 1))
    stream = handle.stream()
    await anext(stream)
    waiting = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    stream.close()
    with pytest.raises(StopAsyncIteration):
        await waiting
    assert await read(stream) == []
    assert stream.ready() is None
    assert (stream.terminal, stream.next_offset) == (None, 1)
    (reader,) = client._readers._readers[0]
    assert reader._followers == {}


async def test_a_stream_closed_before_its_use_ends_too(client: AsyncClient) -> None:
    handle = await client.submit("x")
    stream = handle.stream()
    await stream.aclose()
    assert await read(stream) == []
    assert client._readers._readers == {}


async def test_a_stream_closed_while_it_begins_ends_too() -> None:
    subscription = Subscription("x", 0)

    async def follow(job_id: str, from_total: int) -> Subscription:
        stream.close()
        return subscription

    stream = TokenStream(follow, "x", from_offset=0, idle_timeout_s=300)
    assert await read(stream) == []
    assert not subscription.wants_events


async def test_what_ended_a_job_is_raised_although_the_stream_was_closed(
    client: AsyncClient, worker: Any, words: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    event = replace(words(0, 1), terminal=Terminal(FinishReason.CANCELLED))
    await worker.publish(claimed, 0, event, terminal=FinishReason.CANCELLED)
    stream = handle.stream()
    await anext(stream)
    stream.close()
    with pytest.raises(JobCancelled):
        await anext(stream)


async def test_a_closed_client_ends_its_streams_and_refuses_more(
    valkey_url: str, queue: str
) -> None:
    client = AsyncClient(valkey_url, queue)
    handle = await client.submit("x")
    waiting = asyncio.create_task(handle.result())
    await asyncio.sleep(0.05)
    await client.aclose()
    with pytest.raises(InferqError, match="closed"):
        await waiting
    with pytest.raises(InferqError, match="closed"):
        await client.submit("x")
    with pytest.raises(InferqError, match="closed"):
        handle.stream()
