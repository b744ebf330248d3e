"""What one job's damaged keys do: end its own streams with a typed error, and nobody else's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ResponseError

from inferq.producer import AsyncClient, TokenStream
from inferq.producer.probe import Probe
from inferq.producer.reader import StreamReader
from inferq.producer.subscription import Subscription
from inferq.protocol.errors import JobError, ServerLost
from inferq.protocol.keys import QueueKeys

HOUR_S = 3600.0


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what is wrong to the read: a stream is looked after when it begins, and not again."""
    monkeypatch.setattr("inferq.producer.reader.PROBE_S", HOUR_S)


@pytest.fixture
async def healthy(client: AsyncClient, worker: Any, words: Any) -> Any:
    """A stream in use, and what serves the rest of its job."""
    handle = await client.submit("healthy")
    claimed, _ = await worker.claim_one()
    await worker.publish(claimed, 0, words(0, 1))
    stream = handle.stream()
    assert (await anext(stream)).token_ids == (0,)

    async def reads_the_rest(ending: Any) -> bool:
        await worker.publish(claimed, 1, words(1, 2))
        assert (await anext(stream)).token_ids == (1,)
        await worker.publish(claimed, 2, ending(2), terminal="length")
        return [event.token_ids async for event in stream] == [()]

    return reads_the_rest


def reader_of(client: AsyncClient) -> StreamReader:
    (reader,) = client._readers._readers[0]
    return reader


async def damage(redis_client: Any, key: str) -> None:
    async with redis_client.pipeline(transaction=True) as pipeline:
        pipeline.delete(key)
        pipeline.set(key, "not what belongs here")
        await pipeline.execute()


async def begin(client: AsyncClient, worker: Any, words: Any) -> TokenStream:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    await worker.publish(claimed, 0, words(0, 1))
    stream = handle.stream()
    await anext(stream)
    return stream


@pytest.mark.usefixtures("no_probes")
async def test_a_stream_that_cannot_be_read_ends_alone(
    client: AsyncClient, worker: Any, valkey_client: Any, words: Any, ending: Any, healthy: Any
) -> None:
    stream = await begin(client, worker, words)
    await damage(valkey_client, worker.keys.out(stream.job_id))
    reader_of(client).wake()
    with pytest.raises(JobError, match=r"cannot be read.*WRONGTYPE") as caught:
        await anext(stream)
    assert caught.value.job_id == stream.job_id
    assert await healthy(ending)


@pytest.mark.parametrize("kind", ["out", "job"])
async def test_a_job_that_cannot_be_looked_after_ends_alone(
    client: AsyncClient, worker: Any, valkey_client: Any, queue: str, kind: str
) -> None:
    now = asyncio.get_running_loop().time()
    first, damaged, last = [Subscription((await client.submit("x")).id, 0) for _ in range(3)]
    await damage(valkey_client, getattr(QueueKeys(queue), kind)(damaged.job_id))
    server, scripts = client.connections.server(0), client.connections.scripts(0)
    probe = Probe(server, scripts, retention_ms=1000)
    await probe.look_after([first, damaged, last], now)
    with pytest.raises(JobError, match="cannot be read") as caught:
        await damaged.get()
    assert caught.value.job_id == damaged.job_id
    assert first.wants_events
    assert last.wants_events


async def test_a_damaged_wake_stream_ends_nobody(
    client: AsyncClient, valkey_client: Any, ending: Any, healthy: Any
) -> None:
    await damage(valkey_client, reader_of(client)._wake_key)
    assert await healthy(ending)


async def test_a_server_that_refuses_everything_is_no_jobs_fault(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: Any, **options: Any) -> Any:
        raise ResponseError("ERR unknown command")

    subscription = Subscription((await client.submit("x")).id, 0)
    server, scripts = client.connections.server(0), client.connections.scripts(0)
    probe = Probe(server, scripts, retention_ms=1000)
    for place, step in ((probe, "_look"), (scripts, "expire")):
        with monkeypatch.context() as patch:
            patch.setattr(place, step, refuse)
            with pytest.raises(ServerLost, match="unknown command"):
                await probe.look_after([subscription], asyncio.get_running_loop().time())
    assert subscription.wants_events


async def test_a_read_that_is_refused_whatever_is_read_may_pass(
    client: AsyncClient, ending: Any, healthy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = []
    read = redis.asyncio.Redis.xread

    async def refuse_at_first(self: Any, *args: Any, **options: Any) -> Any:
        if len(refusals) < 4:  # of all, of the one stream, of the wake stream, of a new one
            refusals.append(ResponseError("ERR unknown command"))
            raise refusals[-1]
        return await read(self, *args, **options)

    monkeypatch.setattr(redis.asyncio.Redis, "xread", refuse_at_first)
    assert await healthy(ending)
    assert len(refusals) == 4


async def test_a_refusal_that_no_stream_explains_may_pass(
    client: AsyncClient, ending: Any, healthy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reader_of(client)
    read, refusals = reader._read_blocked, []

    async def refuse_once(*args: Any) -> Any:
        if not refusals:
            refusals.append(ResponseError("ERR for once"))
            raise refusals[0]
        return await read(*args)

    monkeypatch.setattr(reader, "_read_blocked", refuse_once)
    assert await healthy(ending)
    assert refusals
