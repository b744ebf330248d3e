"""A connection held for the scripts that run all the time.

A pooled call looks for a connection, asks whether it is still good, wraps each write in a task and
each reply in a timer; that is half of what a publish costs. Here a call is one write and one read
under one time-out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

#: Seconds that one call may take.
CALL_TIMEOUT_S: Final = 5.0
#: Seconds without a call after which the other end may have closed the connection.
IDLE_S: Final = 5.0


class ScriptConnection(Redis):
    """A client whose `evalsha` and `eval` use one connection of their own, one call at a time.

    It connects when first called, and anew after an error; nothing is retried. Other commands go
    through the pool of `client`, which it shares.
    """

    def __init__(self, client: Redis) -> None:
        super().__init__(connection_pool=client.connection_pool)
        self._held: Any = None
        self._used_at = 0.0
        self._turn = asyncio.Lock()

    def evalsha(self, sha: str, numkeys: int, *keys_and_args: Any) -> Awaitable[Any]:
        """Run a loaded script; see `redis.asyncio.Redis`."""
        return self._call("EVALSHA", sha, numkeys, *keys_and_args)

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Awaitable[Any]:
        """Run a script; see `redis.asyncio.Redis`."""
        return self._call("EVAL", script, numkeys, *keys_and_args)

    async def disconnect(self) -> None:
        """Close the connection."""
        if self._held is not None:
            await self._held.disconnect(nowait=True)

    async def _call(self, *command: Any) -> Any:
        async with self._turn:
            if self._held is None:
                self._held = self.connection_pool.make_connection()  # type: ignore[no-untyped-call]
                self._held.socket_timeout = None  # the time-out below covers all
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S) as limit:
                    await self._drop_if_closed()
                    await self._held.connect()
                    await self._held.send_command(*command)
                    return await self._held.read_response()
            except TimeoutError:
                # redis-py has dropped the connection: what the reply would be is not known.
                if not limit.expired():
                    raise
                raise RedisTimeoutError(f"no reply within {CALL_TIMEOUT_S:.15g} s") from None

    async def _drop_if_closed(self) -> None:
        now = time.monotonic()
        if self._held.is_connected and now > self._used_at + IDLE_S:
            try:
                await self._held.send_command("PING")
                await self._held.read_response()
            except (RedisConnectionError, OSError):
                await self._held.disconnect(nowait=True)
        self._used_at = now
