"""The server is away, refuses us, or loses replies: typed errors in bounded time, nothing twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions

from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient, QueueAdmin
from inferq.producer.server import COMMAND_CONNECTIONS
from inferq.protocol.errors import (
    InferqError,
    QueueFull,
    ResultTimeout,
    ServerLost,
    StreamExpired,
)
from inferq.protocol.messages import FinishReason


class DroppingProxy:
    """A TCP proxy that can cut connections, hold replies back, or keep them for itself."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.replies_to_drop = 0
        self.is_silent = False
        self.dropped = 0
        self.accepted = 0
        self.may_reply = asyncio.Event()
        self.may_reply.set()
        self.held_back = 0

    @asynccontextmanager
    async def run(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        up = asyncio.create_task(self._pass(reader, up_writer))
        try:
            while data := await up_reader.read(65536):
                if self.replies_to_drop > 0 and b"created" in data:
                    self.replies_to_drop -= 1
                    self.dropped += 1
                    break
                self.held_back += 1
                await self.may_reply.wait()
                self.held_back -= 1
                if not self.is_silent:
                    writer.write(data)
        finally:
            up.cancel()
            for each in (writer, up_writer):
                each.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_lost_reply_to_submit_never_makes_a_second_job(
    valkey_server: EmbeddedServer, queue: str, worker: Any, key: str | None
) -> None:
    proxy = DroppingProxy(valkey_server.port)
    async with proxy.run() as url, AsyncClient(url, queue) as client:
        await client.ping()
        proxy.replies_to_drop = 1
        handle = await client.submit("x", idempotency_key=key)
    assert proxy.dropped == 1
    assert handle.created  # by this very call
    claimed = await worker.claim(max_jobs=10)
    assert [job.job_id for job in claimed] == [handle.id]


async def test_a_server_that_never_answers_is_lost_within_five_seconds(
    valkey_server: EmbeddedServer, queue: str
) -> None:
    proxy = DroppingProxy(valkey_server.port)
    proxy.is_silent = True
    async with proxy.run() as url, AsyncClient(url, queue) as client:
        started = time.monotonic()
        with pytest.raises(ServerLost, match=r"127\.0\.0\.1"):
            await client.submit("x")
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("call", ["submit", "stream", "ping"])
async def test_no_server_is_said_within_five_seconds(unused_tcp_port: int, call: str) -> None:
    started = time.monotonic()
    async with AsyncClient(f"redis://:pass@127.0.0.1:{unused_tcp_port}/0") as client:
        with pytest.raises(ServerLost) as caught:
            await _do(client, call)
    assert time.monotonic() - started < 5
    assert f"127.0.0.1:{unused_tcp_port}" in str(caught.value)
    assert "pass@" not in str(caught.value)


@pytest.mark.parametrize("call", ["submit", "stream", "ping"])
@pytest.mark.parametrize("user", [":guess@", "nobody:guess@", ""])
async def test_a_wrong_password_is_said_within_five_seconds(call: str, user: str) -> None:
    with EmbeddedServer(password="right") as server:
        started = time.monotonic()
        async with AsyncClient(f"redis://{user}127.0.0.1:{server.port}/0") as client:
            with pytest.raises(ServerLost, match="refuses us") as caught:
                await _do(client, call)
        assert time.monotonic() - started < 5
        assert "guess" not in str(caught.value)
        async with AsyncClient(server.url) as client:
            await client.ping()


async def test_a_server_on_a_unix_socket_is_reached(queue: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with EmbeddedServer(settings={"unixsocket": str(path)}):
        async with AsyncClient(f"unix://{path}", queue) as client:
            job = await client.submit("x")
            with pytest.raises(ResultTimeout):
                await job.result(timeout_s=0.1)


async def test_a_server_out_of_memory_is_a_full_queue(queue: str) -> None:
    with EmbeddedServer(settings={"maxmemory": "1"}) as server:
        async with AsyncClient(server.url, queue) as client:
            with pytest.raises(QueueFull, match="memory"):
                await client.submit("x")


@pytest.mark.parametrize("own_server", ["valkey", "redis"], indirect=True)
async def test_a_stream_rides_out_a_restart(
    own_server: EmbeddedServer, queue: str, fake_worker: Any, words: Any, ending: Any
) -> None:
    async with AsyncClient(own_server.url, queue) as client:
        worker = fake_worker(own_server.url)
        handle = await client.submit("x")
        claimed, _ = await worker.claim_one()
        stream = handle.stream(timeout_s=20)
        await worker.publish(claimed, 0, words(0, 2))
        seen = list((await anext(stream)).token_ids)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(own_server.kill)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(own_server.restart)
        await _until_up(worker)
        await worker.publish(claimed, 2, words(2, 4))
        await worker.publish(claimed, 4, ending(4), terminal=FinishReason.LENGTH)
        seen += (await reading).token_ids
        seen += [token async for event in stream for token in event.token_ids]
        assert seen == [0, 1, 2, 3]
        # commands find the server again too
        assert (await handle.status()).state == "done"


async def test_a_restart_that_lost_everything_is_told(
    queue: str, words: Any, fake_worker: Any
) -> None:
    with EmbeddedServer() as server:
        async with AsyncClient(server.url, queue) as client:
            worker = fake_worker(server.url)
            handle = await client.submit("x")
            claimed, _ = await worker.claim_one()
            stream = handle.stream(timeout_s=20)
            await worker.publish(claimed, 0, words(0, 2))
            await anext(stream)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.restart)
            with pytest.raises(StreamExpired):
                await anext(stream)


async def test_a_server_that_stays_away_is_lost_after_a_bounded_time(
    own_server: EmbeddedServer, queue: str
) -> None:
    async with AsyncClient(own_server.url, queue, reconnect_s=0.5, timeout_s=1) as client:
        handle = await client.submit("x")
        waiting = asyncio.create_task(handle.result(timeout_s=30))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(own_server.kill)
        started = time.monotonic()
        with pytest.raises(ServerLost):
            await waiting
        assert time.monotonic() - started < 5
        with pytest.raises(ServerLost):
            await client.submit("y")
        # and the same client works once it is back
        await asyncio.to_thread(own_server.restart)
        assert (await client.submit("z")).created


async def test_a_cancelled_command_leaves_the_connections_in_order(
    valkey_server: EmbeddedServer, queue: str, worker: Any
) -> None:
    proxy = DroppingProxy(valkey_server.port)
    async with proxy.run() as url, AsyncClient(url, queue) as client:
        handles = [await client.submit(str(i), note=b"%d" % i) for i in range(3)]
        await worker.claim()
        await handles[1].cancel()
        # a status has the id that it was asked for: what the server said must differ too
        expected = [("running", b"0"), ("done", b"1"), ("queued", b"2")]
        await asyncio.gather(*(client.ping() for _ in range(COMMAND_CONNECTIONS)))
        assert proxy.accepted == COMMAND_CONNECTIONS
        for _ in range(20):
            proxy.may_reply.clear()
            calls = [asyncio.create_task(handle.status()) for handle in handles]
            while proxy.held_back < len(calls):  # noqa: ASYNC110 - a state of the proxy
                await asyncio.sleep(0.001)
            for call in calls:
                call.cancel()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
            proxy.may_reply.set()
            # a reply left unread would answer the next question
            statuses = [await handle.status() for handle in handles]
            assert [status.job_id for status in statuses] == [handle.id for handle in handles]
            assert [(status.state, status.note) for status in statuses] == expected
        # and no connection was given up for the sake of an unread reply
        assert proxy.accepted == COMMAND_CONNECTIONS


@pytest.fixture
async def stuck(client: AsyncClient) -> asyncio.Task[Any]:
    """A command of `client` that has begun and gets no answer."""
    begun = asyncio.Event()

    async def operation(_: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    call = asyncio.create_task(client.run(operation, slot_key="x"))
    await begun.wait()
    return call


async def test_a_closed_client_ends_commands_with_an_error_and_cancels_nobody(
    client: AsyncClient, stuck: asyncio.Task[Any]
) -> None:
    await client.aclose()
    with pytest.raises(InferqError, match="closed"):
        await stuck


async def test_a_command_of_a_caller_who_is_cancelled_is_cancelled_also_at_a_close(
    client: AsyncClient, stuck: asyncio.Task[Any]
) -> None:
    stuck.cancel()
    await client.aclose()
    with pytest.raises(asyncio.CancelledError):
        await stuck


async def test_a_closed_view_refuses_more(valkey_url: str, queue: str) -> None:
    admin = QueueAdmin(valkey_url, queue)
    await admin.overview()
    await admin.aclose()
    with pytest.raises(InferqError, match="closed"):
        await admin.overview()


async def _do(client: AsyncClient, call: str) -> None:
    actions: dict[str, Callable[[], Any]] = {
        "submit": lambda: client.submit("x"),
        "stream": lambda: anext(client.job("0" * 32 + "-0").stream()),
        "ping": client.ping,
    }
    await actions[call]()


async def _until_up(worker: Any) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await worker.client.ping()
            except redis.exceptions.ConnectionError:
                await asyncio.sleep(0.05)
            else:
                return
