"""The held connection for scripts: replies belong to their calls, whatever happened before."""

from __future__ import annotations

import asyncio

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
