"""Shared readers: many streams, few connections, bounded buffers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient
from inferq.producer.reader import STREAMS_PER_READER
from inferq.producer.subscription import BUFFER_BYTES, BUFFER_EVENTS, Entry, Subscription
from inferq.protocol.messages import Event, FinishReason
from inferq.protocol.replies import PublishItem


@pytest.fixture
async def lone_client(own_server: EmbeddedServer, queue: str) -> AsyncIterator[AsyncClient]:
    """The only client of a server, so that connections can be counted."""
    async with AsyncClient(own_server.url, queue) as client:
        yield client


async def connections(client: redis.asyncio.Redis) -> int:
    """Connections of others than the asking client."""
    return len(await client.client_list()) - 1


@pytest.mark.parametrize("own_server", ["valkey", "redis"], indirect=True)
async def test_1000_streams_at_once_share_8_connections(
    own_server: EmbeddedServer, lone_client: AsyncClient, fake_worker: Any, words: Any, ending: Any
) -> None:
    worker = fake_worker(own_server.url)
    count, tokens = 1000, 6
    handles = await asyncio.gather(*(lone_client.submit("x") for _ in range(count)))
    readers = [asyncio.create_task(handle.result(timeout_s=30)) for handle in handles]
    claimed = await worker.wait_for_jobs(count)

    async def publish(first: int, *events: Event, terminal: FinishReason | None = None) -> None:
        items = [
            PublishItem(
                job.job_id,
                job.epoch,
                first,
                tuple((e.offset + len(e.token_ids), e.encode()) for e in events),
                terminal,
            )
            for job in claimed
        ]
        replies = await worker.scripts.publish("fake", items, lease_ms=10_000, retention_ms=60_000)
        assert {reply.status for reply in replies} == {"ok"}

    for first in range(tokens):
        await publish(first, words(first, first + 1))
        if first == tokens // 2:
            # four readers, since one serves 256; and what commands use
            assert await connections(worker.client) <= 4 + 4
            assert len(lone_client._readers._readers[0]) == 4
    await publish(tokens, ending(tokens), terminal=FinishReason.LENGTH)
    results = await asyncio.gather(*readers)
    assert {result.token_ids for result in results} == {tuple(range(tokens))}
    assert {result.job_id for result in results} == {handle.id for handle in handles}


async def test_a_reader_that_does_not_read_is_bounded_and_holds_up_nobody(
    client: AsyncClient, worker: Any, words: Any, ending: Any
) -> None:
    slow = await client.submit("slow")
    fast = await client.submit("fast")
    jobs = await worker.wait_for_jobs(2)
    slow_stream = slow.stream()
    events = 10 * BUFFER_EVENTS
    reading = asyncio.create_task(fast.result())
    begun = asyncio.create_task(anext(slow_stream))
    for job in jobs:
        await worker.publish(job, 0, *(words(i, i + 1) for i in range(events)))
        await worker.publish(job, events, ending(events), terminal=FinishReason.LENGTH)
    assert (await reading).token_ids == tuple(range(events))
    assert (await begun).token_ids == (0,)
    subscription = slow_stream._subscription
    assert subscription is not None
    await asyncio.sleep(0.1)
    assert 0 < len(subscription._entries) <= BUFFER_EVENTS
    # and loses nothing when it reads at last
    rest = [token async for event in slow_stream for token in event.token_ids]
    assert rest == list(range(1, events))


async def test_two_readers_of_one_job_each_get_all_of_it(
    client: AsyncClient, worker: Any, words: Any, ending: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    early = handle.stream()
    await worker.publish(claimed, 0, words(0, 1), words(1, 2))
    seen = [await anext(early)]
    late = asyncio.create_task(handle.result())
    resumed = handle.stream(1)
    await worker.publish(claimed, 2, words(2, 3))
    await worker.publish(claimed, 3, ending(3), terminal=FinishReason.LENGTH)
    seen += [event async for event in early]
    assert [t for e in seen for t in e.token_ids] == [0, 1, 2]
    assert (await late).token_ids == (0, 1, 2)
    assert [t async for e in resumed for t in e.token_ids] == [1, 2]


async def test_a_new_stream_wakes_a_blocked_reader(
    client: AsyncClient, worker: Any, words: Any
) -> None:
    idle = await client.submit("idle")
    waiting = asyncio.create_task(idle.result())
    await asyncio.sleep(0.3)  # the reader now blocks, on a stream where nothing comes
    claimed = await worker.claim(max_jobs=1)
    fresh = await client.submit("fresh")
    (job,) = await worker.claim(max_jobs=1)
    await worker.publish(job, 0, words(0, 1))
    started = asyncio.get_running_loop().time()
    await anext(fresh.stream())
    assert asyncio.get_running_loop().time() - started < 0.5
    await worker.serve(claimed[0], 1)
    await waiting


async def test_wake_keys_expire_and_idle_readers_go(
    own_server: EmbeddedServer, lone_client: AsyncClient, fake_worker: Any
) -> None:
    worker = fake_worker(own_server.url)
    for _ in range(3):
        handle = await lone_client.submit("x")
        reading = asyncio.create_task(handle.result())
        await asyncio.sleep(0.1)
        await worker.serve((await worker.claim_one())[0], 1)
        await reading
    assert len(lone_client._readers._readers[0]) == 1
    wake_keys = [key async for key in worker.client.scan_iter("*:wake:*")]
    assert len(wake_keys) == 1
    assert 0 < await worker.client.ttl(wake_keys[0]) <= 60
    before = await connections(worker.client)
    async with asyncio.timeout(8):
        while lone_client._readers._readers[0][0].is_serving:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.1)
    await asyncio.sleep(0.1)
    assert await connections(worker.client) == before - 1
    # and a stream after that gets a new one
    handle = await lone_client.submit("x")
    await worker.serve((await worker.claim_one())[0], 2)
    assert (await handle.result()).token_ids == (0, 1)


async def test_a_buffer_takes_no_more_than_its_bytes_and_each_entry_once() -> None:
    subscription = Subscription("x", 0)
    big = b"x" * (BUFFER_BYTES // 2)
    taken = [subscription.push(Entry(i, False, big)) for i in range(1, 6)]
    assert taken == [True, True, True, False, False]
    assert not subscription.wants_events
    assert not subscription.push(Entry(2, False, b"again"))
    assert [(await subscription.get()).total for _ in range(3)] == [1, 2, 3]
    assert subscription.push(Entry(4, True, b""))
    assert not subscription.push(Entry(5, False, b""))


def test_a_reader_serves_some_hundred_streams() -> None:
    assert 200 <= STREAMS_PER_READER <= 500


async def test_what_is_there_is_taken_without_waiting(
    client: AsyncClient, worker: Any, words: Any, ending: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    stream = handle.stream()
    assert stream.ready() is None
    for i in range(4):
        await worker.publish(claimed, i, words(i, i + 1))
    await worker.publish(claimed, 4, ending(4), terminal=FinishReason.LENGTH)
    taken = [await anext(stream)]
    while (event := stream.ready()) is not None:
        taken.append(event)
    assert [event.offset for event in taken] == [0, 1, 2, 3, 4]
    assert taken[-1].finish_reason is FinishReason.LENGTH
    assert stream.ready() is None
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
