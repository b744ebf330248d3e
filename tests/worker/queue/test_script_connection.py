"""The held connection for scripts: replies belong to their calls, whatever happened before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
import redis.asyncio
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from inferq.worker.queue import script_connection
from inferq.worker.queue.script_connection import ScriptConnection

ECHO = "return ARGV[1]"
#: Keeps the server busy for some 0.1 s, by counting: a script's clock stands still. Then echoes.
SLOW = "for i = 1, 2e7 do end return ARGV[1]"


@pytest.fixture
async def connection(valkey_client: redis.asyncio.Redis):
    held = ScriptConnection(valkey_client)
    yield held
    await held.disconnect()


async def test_calls_at_once_get_their_own_replies(connection: ScriptConnection) -> None:
    replies = await asyncio.gather(*(connection.eval(ECHO, 0, n) for n in range(50)))
    assert replies == [str(n).encode() for n in range(50)]


async def test_an_error_reply_leaves_the_connection_in_use(
    connection: ScriptConnection, valkey_client: redis.asyncio.Redis
) -> None:
    assert await connection.eval(ECHO, 0, "a") == b"a"
    before = await _connections(valkey_client)
    with pytest.raises(NoScriptError):
        await connection.evalsha("0" * 40, 0)
    with pytest.raises(ResponseError):
        await connection.eval("return redis.call('NOSUCH')", 0)
    assert await connection.eval(ECHO, 0, "b") == b"b"
    assert await _connections(valkey_client) == before


async def test_a_call_that_is_cancelled_leaves_no_reply_to_the_next(
    connection: ScriptConnection,
) -> None:
    await connection.eval(ECHO, 0, "warm")
    call = asyncio.create_task(connection.eval(SLOW, 0, "slow"))
    await asyncio.sleep(0.02)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await connection.eval(ECHO, 0, "next") == b"next"


async def test_a_call_that_takes_too_long_ends_and_leaves_no_reply_to_the_next(
    connection: ScriptConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await connection.eval(ECHO, 0, "warm")
    monkeypatch.setattr(script_connection, "CALL_TIMEOUT_S", 0.01)
    with pytest.raises(RedisTimeoutError, match="no reply within"):
        await connection.eval(SLOW, 0, "slow")
    monkeypatch.undo()
    assert await connection.eval(ECHO, 0, "next") == b"next"


class Clock:
    """The event loop's, which a test may move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        now, self._ahead_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: now() + self._ahead_s)

    async def pass_time(self, seconds: float) -> None:
        """Have all run that falls due by then."""
        self._ahead_s += seconds
        for _ in range(10):
            await asyncio.sleep(0)


@asynccontextmanager
async def halting_proxy(
    url: str, *, after: int, go_on: asyncio.Event
) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of a way to the server that brings so many bytes of replies and no more for now."""
    parts = urlsplit(url)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(parts.hostname, parts.port)

        async def requests() -> None:
            while data := await reader.read(2**16):
                up_writer.write(data)
            up_writer.close()

        async def replies() -> None:
            left = after
            while data := await up_reader.read(min(2**16, left) if left else 2**16):
                writer.write(data)
                await writer.drain()
                left = max(0, left - len(data))
                if not left:
                    await go_on.wait()
            writer.close()

        await asyncio.gather(requests(), replies(), return_exceptions=True)

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, redis.asyncio.Redis(host="127.0.0.1", port=port) as client:
        yield client
        go_on.set()


REPLY_BYTES, CAME_BYTES = 400_000, 300_000


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_call_has_more_time_for_a_reply_that_comes_and_no_more_when_it_stops(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    monkeypatch.setattr(script_connection, "MIN_BYTES_PER_S", 1000)
    clock, go_on = Clock(monkeypatch), asyncio.Event()
    async with halting_proxy(valkey_url, after=CAME_BYTES, go_on=go_on) as client:
        held = ScriptConnection(client)
        call = asyncio.create_task(held.eval("return string.rep('x', ARGV[1])", 0, REPLY_BYTES))
        while held._received < CAME_BYTES - 1000:  # noqa: ASYNC110 - connecting took some
            await asyncio.sleep(0.001)
        await clock.pass_time(200)  # five seconds, and one for each 1,000 bytes, are more
        assert not call.done()
        if is_silent:
            await clock.pass_time(200)
            with pytest.raises(RedisTimeoutError, match=r"no reply within .* bytes .* came"):
                await call
            go_on.set()
            assert await held.eval(ECHO, 0, "next") == b"next"
        else:
            go_on.set()
            assert await call == b"x" * REPLY_BYTES
        await held.disconnect()


async def test_a_call_has_more_time_for_what_it_sends(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_connection, "MIN_BYTES_PER_S", 1000)
    clock, go_on = Clock(monkeypatch), asyncio.Event()
    sent = b"x" * 100_000
    async with halting_proxy(valkey_url, after=1, go_on=go_on) as client:
        held = ScriptConnection(client)
        call = asyncio.create_task(held.eval("return #ARGV[1]", 0, sent))
        while held._limit is None:  # noqa: ASYNC110 - until it is under way
            await asyncio.sleep(0)
        await clock.pass_time(100)
        assert not call.done()
        go_on.set()
        assert await call == len(sent)
        await held.disconnect()


async def test_a_connection_that_the_server_closed_is_made_anew(
    connection: ScriptConnection, valkey_client: redis.asyncio.Redis
) -> None:
    await connection.eval(ECHO, 0, "a")
    await valkey_client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await asyncio.sleep(0.05)
    with pytest.raises(redis.exceptions.ConnectionError):
        await connection.eval(ECHO, 0, "b")
    assert await connection.eval(ECHO, 0, "c") == b"c"


async def test_one_that_was_closed_while_idle_is_made_anew_before_the_call(
    connection: ScriptConnection,
    valkey_client: redis.asyncio.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await connection.eval(ECHO, 0, "a")
    await valkey_client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    monkeypatch.setattr(script_connection, "IDLE_S", 0.01)
    await asyncio.sleep(0.05)
    assert await connection.eval(ECHO, 0, "b") == b"b"


async def _connections(client: redis.asyncio.Redis) -> int:
    return int((await client.info("stats"))["total_connections_received"])
