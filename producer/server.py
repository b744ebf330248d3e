"""The Redis server behind a client: time-outs, bounded retries, and errors in our own types."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from redis import exceptions as redis_errors
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from inferq.protocol.connection import translate_errors
from inferq.protocol.errors import InferqError, ServerLost
from inferq.protocol.servers import ServerUrl
from inferq.protocol.task_ends import end_tasks

#: Connections for commands; readers of streams bring their own.
COMMAND_CONNECTIONS: Final = 4
#: Longest time in seconds to connect.
CONNECT_TIMEOUT_S: Final = 2.0
#: First and longest pause in seconds between tries.
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 0.5


T = TypeVar("T")


class RedisServer:
    """Connections to the server of the keys with `slot_key`'s hash tag; `name` is its address.

    `timeout_s` bounds one command with all its retries. Every operation passed to `call` must be
    idempotent, since a lost reply repeats it.
    """

    def __init__(self, url: ServerUrl, slot_key: str, *, timeout_s: float) -> None:
        self.name = url.name
        self.timeout_s = timeout_s
        self._url = url
        self._slot_key = slot_key
        self._commands: Redis | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(COMMAND_CONNECTIONS)
        self._calls: set[asyncio.Task[Any]] = set()
        self._last_success: float | None = None
        self._is_closed = False

    @property
    def commands(self) -> Redis:
        """The pooled connections, for operations inside `call`."""
        if self._commands is None:
            self._commands = self._connect(
                socket_timeout_s=self.timeout_s / 2, max_connections=COMMAND_CONNECTIONS
            )
        return self._commands

    def dedicated(self, *, longest_block_s: float) -> Redis:
        """Return a client with one connection of its own, for reads that block."""
        return self._connect(
            socket_timeout_s=longest_block_s + self.timeout_s, single_connection=True
        )

    async def call(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Perform an idempotent operation on `commands`, again after a lost connection or reply.

        A caller that is cancelled leaves the operation to end by itself, so that no reply stays
        unread on a pooled connection. Raises `ServerLost` or `QueueFull`, and `InferqError` when
        this is closed, before or meanwhile.
        """
        self._bind_to_loop()
        if self._is_closed:
            raise InferqError("this client is closed")
        task = asyncio.ensure_future(self._in_slot(operation))
        self._calls.add(task)
        task.add_done_callback(self._call_done)
        # not a shield, which would pass the cancel of `aclose` on to a caller whom nobody cancelled
        await asyncio.wait((task,))
        if task.cancelled() and self._is_closed:
            raise InferqError("the client was closed before the server answered")
        return task.result()

    async def greet(self) -> None:
        """Make sure that the server is there and lets us in, unless it did before."""
        if self._last_success is None:
            await self.ping()

    async def ping(self) -> None:
        """Make sure that the server is there and lets us in."""
        await self.call(self._ping)

    async def aclose(self) -> None:
        """Close the pooled connections; calls in progress end with an error."""
        self._is_closed = True
        await end_tasks(self._calls)
        if self._commands is not None:
            await self._commands.aclose()
            self._commands = None

    async def _ping(self) -> None:
        await self.commands.ping()

    async def _in_slot(self, operation: Callable[[], Awaitable[T]]) -> T:
        await self._wait_for_slot()
        try:
            return await self._with_retries(operation)
        finally:
            self._slots.release()

    async def _wait_for_slot(self) -> None:
        """Wait for a connection as long as others make progress with theirs."""
        clock = asyncio.get_running_loop().time
        started = clock()
        while True:
            give_up = max(started, self._last_success or 0.0) + self.timeout_s
            if clock() >= give_up:
                raise ServerLost(self._no_answer)
            try:
                async with asyncio.timeout_at(give_up):
                    await self._slots.acquire()
                    return
            except TimeoutError:
                continue

    async def _with_retries(self, operation: Callable[[], Awaitable[T]]) -> T:
        clock = asyncio.get_running_loop().time
        give_up = clock() + self.timeout_s
        pause = FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout_at(give_up):
                    result = await self._translated(operation)
            except TimeoutError:
                raise ServerLost(self._no_answer) from None
            except ServerLost as error:
                # a server that was never there is a wrong address, not a restart: say so soon
                is_unknown = self._last_success is None and pause > FIRST_PAUSE_S
                if error.is_refusal or is_unknown or clock() + pause > give_up:
                    raise
            else:
                self._last_success = clock()
                return result
            await asyncio.sleep(jitter(pause))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _translated(self, operation: Callable[[], Awaitable[T]]) -> T:
        try:
            with translate_errors(self.commands):
                return await operation()
        except (redis_errors.RedisError, OSError) as error:
            raise InferqError(f"the Redis server at {self.name} answered: {error}") from error

    @property
    def _no_answer(self) -> str:
        return f"no answer from the Redis server at {self.name} within {self.timeout_s:.15g} s"

    def _bind_to_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise InferqError(
                "this AsyncClient belongs to another event loop: make one per loop, or use Client"
            )

    def _call_done(self, task: asyncio.Task[Any]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # a cancelled caller leaves it unread, which asyncio would log

    def _connect(
        self, *, socket_timeout_s: float, single_connection: bool = False, **options: Any
    ) -> Redis:
        return self._url.client(
            self._slot_key,
            single_connection=single_connection,
            protocol=2,
            decode_responses=False,
            socket_connect_timeout=min(CONNECT_TIMEOUT_S, self.timeout_s),
            socket_timeout=socket_timeout_s,
            retry=Retry(NoBackoff(), 0),  # `call` retries, within a time instead of a count
            **options,
        )


def jitter(pause_s: float) -> float:
    """Return half to all of `pause_s`, at random, so that clients do not return in step."""
    return pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
