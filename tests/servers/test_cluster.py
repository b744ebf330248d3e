"""A queue on a Cluster of three nodes: every partition lives on the node of its slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from redis.crc import key_slot

from inferq.producer import AsyncClient, QueueAdmin
from inferq.protocol.errors import ServerLost
from inferq.protocol.keys import QueueKeys, partition_of

PARTITIONS = 6


def slot_of(queue: str, partition: int) -> int:
    return int(key_slot(QueueKeys(queue, partition).prefix.encode()))


async def test_jobs_of_all_partitions_are_served_on_their_nodes(
    cluster: Any, mini_worker: Callable[..., Any], queue: str
) -> None:
    async with AsyncClient(cluster.url, queue, partitions=PARTITIONS) as client:
        await client.ping()
        jobs = [await client.submit("x") for _ in range(40)]
        assert len({cluster.node_of(slot_of(queue, partition_of(job.id))) for job in jobs}) > 1
        results = [asyncio.create_task(job.result(timeout_s=20)) for job in jobs]
        for partition in range(PARTITIONS):
            worker = mini_worker(cluster.url, partition)
            for job in await worker.claim():
                for offset in range(3):
                    await worker.token(job, offset)
                await worker.end(job, 3)
        for result in await asyncio.gather(*results):
            assert result.text == "0 1 2 "
    async with QueueAdmin(cluster.url, queue, partitions=PARTITIONS) as admin:
        overview = await admin.overview()
        assert (overview.load.queued, overview.load.running) == (0, 0)


async def test_a_stream_goes_on_when_its_slot_moves_to_another_node(
    cluster: Any, mini_worker: Callable[..., Any], queue: str
) -> None:
    slot = slot_of(queue, 0)
    source = cluster.node_of(slot)
    target = (source + 1) % 3
    worker = mini_worker(cluster.url)
    async with AsyncClient(cluster.url, queue) as client:
        job = await client.submit("x")
        stream = job.stream(timeout_s=20)
        [claimed] = await worker.claim()
        await worker.token(claimed, 0)
        seen = [await anext(stream)]
        cluster.move(slot, source, target)
        for offset in (1, 2):
            try:
                reply = await worker.token(claimed, offset)
            except ServerLost as error:  # and again, as the publisher does
                assert "changed its part" in str(error)  # noqa: PT017
                reply = await worker.token(claimed, offset)
            assert reply.offset == offset + 1
        await worker.end(claimed, 3)
        seen += [event async for event in stream]
        tokens = [token for event in seen for token in event.token_ids]
        assert tokens == [0, 1, 2]
        assert (await job.status()).state == "done"
    cluster.move(slot, target, source)


async def test_nodes_that_are_gone_cost_a_look_up_no_time(
    cluster: Any, mini_worker: Callable[..., Any], free_port: int
) -> None:
    url = cluster.url.replace("redis+cluster://", f"redis+cluster://127.0.0.1:{free_port},")
    worker = mini_worker(url)
    started = time.monotonic()
    assert await worker.claim() == []
    assert time.monotonic() - started < 2


async def test_a_single_server_s_url_of_a_cluster_is_refused_with_advice(
    cluster: Any, queue: str
) -> None:
    owner = cluster.node_of(slot_of(queue, 0))
    other = cluster.nodes[(owner + 1) % 3]
    async with AsyncClient(other.url, queue) as client:
        with pytest.raises(ServerLost, match=r"redis\+cluster://"):
            await client.submit("x")
