"""What the server refuses or cannot do arrives as inferq's errors, and never with a password."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from redis._parsers.base import BaseParser
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from inferq.embedded import EmbeddedServer
from inferq.protocol.connection import translate_errors
from inferq.protocol.errors import InvalidRequestError, QueueFull, ServerLost
from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import FinishReason
from inferq.protocol.scripts import QueueScripts

PASSWORD = "s3cret-word"
NO_RETRY = Retry(NoBackoff(), 0)


async def load_through(url: str) -> None:
    async with redis.asyncio.Redis.from_url(url, retry=NO_RETRY, socket_timeout=0.2) as client:
        await QueueScripts(client, QueueKeys("q")).load()


async def test_no_server_is_a_lost_server_that_names_the_place(unused_tcp_port: int) -> None:
    with pytest.raises(ServerLost, match=f"cannot reach Redis at 127.0.0.1:{unused_tcp_port}") as e:
        await load_through(f"redis://:{PASSWORD}@127.0.0.1:{unused_tcp_port}/0")
    assert PASSWORD not in str(e.value)


async def test_a_wrong_password_is_said_and_not_shown(server: Any) -> None:
    with pytest.raises(ServerLost, match="refuses us") as e:
        await load_through(f"redis://nobody:{PASSWORD}@127.0.0.1:{server.port}/0")
    assert PASSWORD not in str(e.value)


async def test_a_server_that_hangs_is_a_lost_server() -> None:
    done = asyncio.Event()

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()

    mute = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = mute.sockets[0].getsockname()[1]
    with pytest.raises(ServerLost, match="does not answer"):
        await load_through(f"redis://127.0.0.1:{port}/0")
    done.set()
    mute.close()
    await mute.wait_closed()


async def test_a_server_of_another_protocol_is_a_lost_server() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n<html>")
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    with pytest.raises(ServerLost, match="does not speak Redis' protocol"):
        await load_through(f"redis://127.0.0.1:{port}/0")
    other.close()
    await other.wait_closed()


async def test_a_user_without_the_right_to_run_scripts_is_told(q: Any, server: Any) -> None:
    await q.redis.acl_setuser("reader", enabled=True, nopass=True, keys=["*"], commands=["+ping"])
    try:
        async with redis.asyncio.Redis(port=server.port, username="reader", password="x") as client:
            with pytest.raises(ServerLost, match="refuses us"):
                await QueueScripts(client, q.keys).cancel("0" * 32 + "-0", retention_ms=1)
    finally:
        await q.redis.acl_deluser("reader")


def test_a_fault_of_ours_passes() -> None:
    client = redis.Redis(unix_socket_path="/run/redis.sock")
    for reply in ("ERR wrong number of arguments", "WRONGTYPE no stream", "BUSYGROUP it exists"):
        with pytest.raises(ResponseError), translate_errors(client):
            raise BaseParser.parse_error(reply)
    client.close()


@pytest.mark.parametrize(
    ("reply", "meaning"),
    [
        ("NOREPLICAS Not enough good replicas to write.", "too few replicas"),
        ("MISCONF Redis is configured to save RDB snapshots, but it's unable to", "to disk"),
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL.", "a script"),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is", "lost its primary"),
        ("LOADING Redis is loading the dataset in memory", "loading its data"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", "another node"),
        ("CLUSTERDOWN The cluster is down", "Cluster that is down"),
        (
            "READONLY You can't write against a read only replica. script: 1f, on @user_script:9.",
            "is a read-only replica: point redis_url at the primary$",
        ),
        (
            "ERR Error running script (call to f_1f): @user_script:3: @user_script: 3: "
            "-READONLY You can't write against a read only replica. ",
            "is a read-only replica: point redis_url at the primary$",
        ),
        ("NOAUTH Authentication required.", "refuses us: it needs a password"),
        ("WRONGPASS invalid username-password pair or user is disabled.", "refuses us: the user"),
        ("NOPERM this user has no permissions to run the 'eval' command", "refuses us.*eval"),
        ("ERR invalid DB index", "refuses us: no such database"),
        ("ERR DB index is out of range", "refuses us: no such database"),
        ("ERR Protocol error: unauthenticated multibulk length", "needs a password"),
    ],
)
def test_what_the_server_cannot_do_now_is_a_lost_server_in_words_of_its_own(
    reply: str, meaning: str
) -> None:
    client = redis.Redis(unix_socket_path="/run/redis.sock")
    said = rf"^Redis at /run/redis\.sock .*{meaning}"
    with pytest.raises(ServerLost, match=said), translate_errors(client):
        raise BaseParser.parse_error(reply)
    client.close()


async def test_a_server_that_misses_replicas_refuses_all_and_writes_nothing(q: Any) -> None:
    await q.enqueue()
    before = set(await q.redis.keys(f"{q.keys.prefix}*"))
    await q.redis.config_set("min-replicas-to-write", 1)
    try:
        for call in (q.enqueue, q.claim):
            with pytest.raises(ServerLost, match="too few replicas"):
                await call()
    finally:
        await q.redis.config_set("min-replicas-to-write", 0)
    assert set(await q.redis.keys(f"{q.keys.prefix}*")) == before
    assert len((await q.claim()).claimed) == 1


async def test_a_replica_is_told_from_a_server_that_cannot_be_reached(q: Any) -> None:
    await q.redis.replicaof("127.0.0.1", 1)
    try:
        with pytest.raises(ServerLost, match=r"read-only replica: point redis_url at the primary$"):
            await q.enqueue()
    finally:
        await q.redis.replicaof("NO", "ONE")


@pytest.mark.parametrize("version", [2, 3])
async def test_a_password_that_is_missing_is_said_whatever_the_command(version: int) -> None:
    with EmbeddedServer(password=PASSWORD) as server:
        async with redis.asyncio.Redis(
            port=server.port, retry=NO_RETRY, protocol=version
        ) as client:
            scripts = QueueScripts(client, QueueKeys("q"))
            with pytest.raises(ServerLost, match="refuses us: it needs a password"):
                await scripts.load()
            with pytest.raises(ServerLost, match="refuses us: it needs a password"):
                await scripts.reconcile("a", ["b"])


async def test_a_database_that_does_not_exist_is_said(server: Any) -> None:
    with pytest.raises(ServerLost, match="no such database"):
        await load_through(f"redis://127.0.0.1:{server.port}/99")


async def test_a_client_that_decodes_responses_is_refused(server: Any) -> None:
    async with redis.asyncio.Redis(port=server.port, decode_responses=True) as client:
        with pytest.raises(InvalidRequestError, match="decode"):
            QueueScripts(client, QueueKeys("q"))


async def test_scripts_that_the_server_forgot_are_sent_again(q: Any) -> None:
    await q.enqueue()
    await q.redis.script_flush()
    assert len((await q.claim()).claimed) == 1
    await q.redis.script_flush()
    assert await q.cancel("0" * 32 + "-0") == "unknown"


@pytest.fixture
async def full_memory(q: Any) -> AsyncIterator[None]:
    """Lets a test fill the server's memory with `maxmemory`; undone at the end."""
    yield
    await q.redis.config_set("maxmemory", 0)


async def test_a_server_out_of_memory_refuses_jobs_and_lets_those_in_hand_end(
    q: Any, full_memory: None
) -> None:
    running, queued, cancelled = [await q.enqueue() for _ in range(3)]
    [first] = (await q.claim(max_jobs=1)).claimed
    assert first.job_id == running
    before = set(await q.redis.keys(f"{q.keys.prefix}*"))
    await q.redis.config_set("maxmemory", 1)
    for options in ({}, {"idempotency_key": "k"}, {"delay_ms": 1000}):
        with pytest.raises(QueueFull, match="out of memory"):
            await q.enqueue(**options)
    assert set(await q.redis.keys(f"{q.keys.prefix}*")) == before
    assert (await q.scripts.load()).queued == 2
    item = q.item(first, first=0, tokens=1, end=FinishReason.STOP)
    assert [r.status for r in await q.publish("a", item)] == ["ok"]
    assert await q.cancel(cancelled) == "cancelled"
    [second] = (await q.claim()).claimed
    assert second.job_id == queued
    assert (await q.end("a", second)).status == "ok"
    await q.assert_nothing_is_left()


async def test_no_script_touches_a_key_outside_its_partition(q: Any, server: Any) -> None:
    await q.redis.acl_setuser(
        "bounded", enabled=True, nopass=True, keys=[f"{q.keys.prefix}*"], commands=["+@all"]
    )
    try:
        async with redis.asyncio.Redis(
            port=server.port, username="bounded", password="x"
        ) as client:
            bounded = type(q)(client, q.keys.queue)
            crashed = await bounded.enqueue(idempotency_key="k", delay_ms=1000)
            await bounded.pass_delay(crashed)
            await bounded.claim("a")
            await bounded.end_lease(crashed)
            await bounded.claim("b", max_crashes=1)
            [letter] = await bounded.scripts.dead_letters()
            again = await bounded.scripts.redrive(letter.entry_id)
            [job] = (await bounded.claim("a")).claimed
            await bounded.publish("a", bounded.item(job, first=0, tokens=1))
            await bounded.scripts.heartbeat("a", [(again, 1)], lease_ms=9, retention_ms=9)
            await bounded.scripts.recost("a", again, 1, prompt_tokens=1, budget=1)
            await bounded.scripts.register("a", {})
            await bounded.scripts.reconcile("a", [])
            await bounded.scripts.release("a", [(again, 1, None)])
            await bounded.scripts.expire(again, retention_ms=9)
            assert await bounded.cancel(again) == "cancelled"
            await bounded.scripts.sweep(gone_ms=0)
            await bounded.assert_nothing_is_left()
            bounded.keys = type(q.keys)(f"{q.keys.queue}-other")
            with pytest.raises(ServerLost, match="refuses us"):
                await QueueScripts(client, bounded.keys).cancel(again, retention_ms=9)
    finally:
        await q.redis.acl_deluser("bounded")
