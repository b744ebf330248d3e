"""A primary becomes a replica under the feet of those connected to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio

from inferq.producer import AsyncClient
from inferq.protocol.errors import ServerLost
from inferq.protocol.keys import QueueKeys
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.servers import ServerUrl
from inferq.worker.queue.script_connection import ScriptConnection


@pytest.fixture
async def demote(server: Any) -> AsyncIterator[Callable[..., Any]]:
    """Makes the server a replica of nobody's, and a primary again."""
    async with redis.asyncio.Redis.from_url(server.url) as raw:

        async def change(*, to_replica: bool) -> None:
            await raw.replicaof(*(("127.0.0.1", 1) if to_replica else ("NO", "ONE")))

        yield change
        await change(to_replica=False)


async def test_a_reader_that_blocks_on_a_demoted_server_reads_on_later(
    server: Any, mini_worker: Callable[..., Any], queue: str, demote: Callable[..., Any]
) -> None:
    worker = mini_worker(server.url)
    async with AsyncClient(server.url, queue, reconnect_s=20) as client:
        job = await client.submit("x")
        stream = job.stream(timeout_s=20)
        [claimed] = await worker.claim()
        await worker.token(claimed, 0)
        seen = [await anext(stream)]
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.2)  # it blocks now
        await demote(to_replica=True)
        with pytest.raises(ServerLost, match="read-only replica"):
            await worker.token(claimed, 1)
        await demote(to_replica=False)
        await worker.token(claimed, 1)
        seen.append(await reading)
        await worker.end(claimed, 2)
        seen += [event async for event in stream]
        assert [token for event in seen for token in event.token_ids] == [0, 1]


async def test_a_wait_for_new_jobs_on_a_demoted_server_is_a_lost_server(
    server: Any, queue: str, demote: Callable[..., Any]
) -> None:
    keys = QueueKeys(queue)
    client = ServerUrl.parse(server.url).client(keys.prefix, socket_timeout=5.0)
    scripts = QueueScripts(client, keys)
    waiting = asyncio.create_task(
        scripts._read(client.xread({keys.load + ":none": "$"}, block=4000))
    )
    await asyncio.sleep(0.2)
    await demote(to_replica=True)
    with pytest.raises(ServerLost, match="has become a replica"):
        await waiting
    await client.aclose()


async def test_a_held_connection_to_a_demoted_server_is_made_anew(
    server: Any, queue: str, demote: Callable[..., Any]
) -> None:
    client = ServerUrl.parse(server.url).client(QueueKeys(queue).prefix, socket_timeout=5.0)
    held = ScriptConnection(client)
    scripts = QueueScripts(held, QueueKeys(queue))
    await scripts.overview()
    await demote(to_replica=True)
    with pytest.raises(ServerLost, match="point redis_url at the primary"):
        await scripts.register("w", {})
    # a name may lead to the new primary the next time
    assert not held._held.is_connected
    await demote(to_replica=False)
    await scripts.register("w", {})
    await held.disconnect()
    await client.aclose()
