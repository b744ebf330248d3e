"""A connection held for the scripts that run all the time.

A pooled call looks for a connection, asks whether it is still good, wraps each write in a task and
each reply in a timer; that is half of what a publish costs. Here a call is one write and one read
under one time-out, which a call that moves much is given more of: a long reply that was cut off
would be asked for again, and cut off again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

#: Seconds that one call may take, besides those that its bytes may.
CALL_TIMEOUT_S: Final = 5.0
#: Bytes for which a call may take a second more: those that it sends, and those of the reply as
#: they come, so that a server which is silent is not waited for. The longest claim (1 MiB, then a
#: job of 8) has 14 s so, less than a lease. It needs a link of some 0.7 MB/s; one with short jobs a
#: quarter of that.
MIN_BYTES_PER_S: Final = 2**20
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
        #: The time-out of the call under way, and the bytes that came in it.
        self._limit: asyncio.Timeout | None = None
        self._received = 0
        #: Where the bytes come in of the connection that there is now.
        self._counted: Any = None

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
        sent = sum(len(part) for part in command if isinstance(part, bytes | str))
        async with self._turn:
            if self._held is None:
                self._held = self.connection_pool.make_connection()  # type: ignore[no-untyped-call]
                self._held.socket_timeout = None  # the time-out below covers all
            self._received = 0
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S + sent / MIN_BYTES_PER_S) as self._limit:
                    await self._drop_if_closed()
                    await self._held.connect()
                    self._count_bytes()
                    await self._held.send_command(*command)
                    return await self._held.read_response()
            except TimeoutError:
                # redis-py has dropped the connection: what the reply would be is not known.
                if self._limit is None or not self._limit.expired():
                    raise
                raise RedisTimeoutError(
                    f"no reply within {CALL_TIMEOUT_S:.15g} s and a second for each "
                    f"{MIN_BYTES_PER_S} bytes ({sent} were sent, {self._received} came)"
                ) from None
            finally:
                self._limit = None

    def _count_bytes(self) -> None:
        """Have what comes in extend the call's time-out. redis-py tells nobody of it."""
        reader = self._held._reader  # noqa: SLF001
        if reader is self._counted:
            return
        self._counted, feed = reader, reader.feed_data

        def feed_and_count(data: bytes) -> None:
            feed(data)
            self._received += len(data)
            if self._limit is not None and not self._limit.expired():
                when = self._limit.when()
                assert when is not None
                self._limit.reschedule(when + len(data) / MIN_BYTES_PER_S)

        reader.feed_data = feed_and_count

    async def _drop_if_closed(self) -> None:
        now = time.monotonic()
        if self._held.is_connected and now > self._used_at + IDLE_S:
            try:
                await self._held.send_command("PING")
                await self._held.read_response()
            except (RedisConnectionError, OSError):
                await self._held.disconnect(nowait=True)
        self._used_at = now
