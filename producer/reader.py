"""Shared reading: one connection follows the event streams of some hundred jobs.

A reader blocks in XREAD over all its streams and one wake stream of its own. A stream that is
added, or read again after a pause, wakes it by an entry there: that needs no right beyond XADD and
EXPIRE on `…:wake:*`. A stream whose buffer is half full is not read for until its owner has
caught up; its cursor stays, so nothing is lost and nothing grows.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError

from inferq.producer.probe import Probe
from inferq.producer.server import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    RedisServer,
    jitter,
)
from inferq.producer.subscription import BUFFER_EVENTS, Entry, Subscription
from inferq.protocol.connection import translate_errors
from inferq.protocol.errors import InferqError, ServerLost
from inferq.protocol.keys import QueueKeys
from inferq.protocol.task_ends import end_tasks

#: Streams of one reader: the cost of XREAD grows with their number.
STREAMS_PER_READER: Final = 256
#: Longest XREAD, in seconds, and how long a reader without streams lives on.
LONGEST_BLOCK_S: Final = 2.0
#: A stream is checked on when nothing has come for this many seconds.
PROBE_S: Final = 2.0
#: Expiry of a wake stream in seconds; written anew by each wake.
WAKE_EXPIRY_S: Final = 60

log = logging.getLogger("inferq.producer")


class StreamReader:
    """One connection that reads for up to `STREAMS_PER_READER` subscriptions of one partition."""

    def __init__(
        self, server: RedisServer, keys: QueueKeys, probe: Probe, *, reconnect_s: float
    ) -> None:
        self._server = server
        self._keys = keys
        self._probe = probe
        self._reconnect_s = reconnect_s
        self._followers: dict[str, list[Subscription]] = {}
        self._count = 0
        self.is_serving = True
        self._wake_key, self._wake_cursor = _new_wake(keys)
        self._is_blocked = False
        self._wakes: set[asyncio.Task[None]] = set()
        self._lost_since: float | None = None
        self._next_pause_s = FIRST_PAUSE_S
        self._task: asyncio.Task[None] | None = None

    @property
    def has_room(self) -> bool:
        """Whether another stream may be added."""
        return self.is_serving and self._count < STREAMS_PER_READER

    def add(self, subscription: Subscription) -> None:
        """Follow one more stream."""
        key = self._keys.out(subscription.job_id)
        self._followers.setdefault(key, []).append(subscription)
        self._count += 1
        subscription.attach(self.wake, self.remove)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._stopped)
        self.wake()

    def remove(self, subscription: Subscription) -> None:
        """Follow it no longer."""
        key = self._keys.out(subscription.job_id)
        followers = self._followers.get(key, [])
        if subscription in followers:
            followers.remove(subscription)
            self._count -= 1
        if not followers:
            self._followers.pop(key, None)

    def wake(self) -> None:
        """Have a blocked read begin anew, with the streams that now want to be read."""
        if self._is_blocked and not self._wakes:
            task = asyncio.create_task(self._send_wake())
            self._wakes.add(task)
            task.add_done_callback(self._wakes.discard)

    async def aclose(self) -> None:
        """Stop, and end every subscription."""
        self.is_serving = False
        tasks = [*self._wakes, *([self._task] if self._task is not None else [])]
        await end_tasks(tasks)

    async def _run(self) -> None:
        connection = self._server.dedicated(longest_block_s=LONGEST_BLOCK_S)
        try:
            is_idle = False
            while self.is_serving and not (is_idle and not self._count):
                is_idle = not self._count
                try:
                    await self._read(connection)
                    await self._look_after_silent()
                    self._lost_since = None
                except ServerLost as error:
                    await self._pause(error)
        finally:
            self.is_serving = False
            await connection.aclose()

    async def _read(self, connection: Redis) -> None:
        now = asyncio.get_running_loop().time()
        starts: dict[str, tuple[int, int]] = {}
        until = now + LONGEST_BLOCK_S
        for key, followers in self._followers.items():
            if hungry := [s for s in followers if s.wants_events]:
                starts[key] = min(s.cursor for s in hungry)
                until = min(until, *(s.probe_at for s in hungry))
        cursors: dict[Any, Any] = {key: f"{total}-{end}" for key, (total, end) in starts.items()}
        cursors[self._wake_key] = self._wake_cursor
        # BLOCK 0 would be for ever
        block_ms = max(1, int((until - now) * 1000))
        try:
            reply = await self._read_blocked(connection, cursors, block_ms)
        except RedisError as error:
            await self._refuse_unreadable(connection, cursors, error)
            return
        for raw_key, entries in reply or ():
            key = raw_key.decode()
            if key == self._wake_key:
                self._wake_cursor = entries[-1][0].decode()
            else:
                self._dispatch(key, starts[key], entries)

    async def _read_blocked(self, connection: Redis, cursors: dict[Any, Any], block_ms: int) -> Any:
        self._is_blocked = True
        try:
            with translate_errors(connection):
                return await connection.xread(cursors, count=BUFFER_EVENTS // 2, block=block_ms)
        finally:
            self._is_blocked = False

    async def _refuse_unreadable(
        self, connection: Redis, cursors: dict[Any, Any], error: RedisError
    ) -> None:
        """End the streams that the server refuses to read, so that the others go on."""
        refusals = {
            key: refusal
            for key, cursor in cursors.items()
            if (refusal := await _refusal(connection, key, cursor)) is not None
        }
        self._wake_key, self._wake_cursor = _new_wake(self._keys)  # the old one may be refused
        is_general = await _refusal(connection, self._wake_key, self._wake_cursor) is not None
        if is_general or not refusals:
            # no stream's fault: it may pass, and is given as long as a server that is away
            raise ServerLost(f"the Redis server at {self._server.name} answered: {error}")
        for key, refusal in refusals.items():
            for subscription in self._followers.get(key, ()):
                subscription.refuse(refusal)

    def _dispatch(self, key: str, start: tuple[int, int], entries: Iterable[Any]) -> None:
        # who came during the read, or stands further back, would miss what lies before `start`
        followers = [s for s in self._followers.get(key, ()) if s.cursor >= start]
        now = asyncio.get_running_loop().time()
        for entry_id, fields in entries:
            entry = Entry.from_redis(entry_id, fields)
            for subscription in followers:
                if subscription.push(entry):
                    subscription.probe_at = _next_probe(subscription, now)

    async def _look_after_silent(self) -> None:
        now = asyncio.get_running_loop().time()
        silent = [
            subscription
            for followers in self._followers.values()
            for subscription in followers
            if subscription.probe_at <= now and subscription.wants_events
        ]
        if silent:
            await self._probe.look_after(silent, now)
        for subscription in silent:
            subscription.probe_at = _next_probe(subscription, now)

    async def _pause(self, error: ServerLost) -> None:
        now = asyncio.get_running_loop().time()
        if self._lost_since is None:
            self._lost_since = now
            self._next_pause_s = FIRST_PAUSE_S
        if error.is_refusal or now - self._lost_since > self._reconnect_s:
            raise error
        await asyncio.sleep(jitter(self._next_pause_s))
        self._next_pause_s = min(2 * self._next_pause_s, LONGEST_PAUSE_S)

    async def _send_wake(self) -> None:
        async def send() -> None:
            pipeline = self._server.commands.pipeline(transaction=True)
            pipeline.xadd(self._wake_key, {"w": "1"}, maxlen=1, approximate=False)
            pipeline.expire(self._wake_key, WAKE_EXPIRY_S)
            await pipeline.execute()

        try:
            await self._server.call(send)
        except InferqError as error:
            # the read in progress ends by itself soon, and finds out what is wrong
            log.debug("could not wake a reader: %s", error)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """End what is still followed: no reader's failure may leave anyone waiting."""
        error = None if task.cancelled() else task.exception()
        ending = InferqError("the client was closed")
        if error is not None:
            ending = error if isinstance(error, InferqError) else InferqError(f"lost: {error!r}")
            ending.__cause__ = error.__cause__ or error
        for followers in list(self._followers.values()):
            for subscription in followers:
                subscription.fail(ending)


async def _refusal(connection: Redis, key: str, cursor: str) -> RedisError | None:
    """Return why the server does not read a stream; None if it does. Raises `ServerLost`."""
    try:
        with translate_errors(connection):
            await connection.xread({key: cursor}, count=1)
    except RedisError as error:
        return error
    return None


def _new_wake(keys: QueueKeys) -> tuple[str, str]:
    """Return the key of a wake stream of one reader's own, and the cursor before its entries."""
    return keys.wake(secrets.token_hex(8)), "0-0"


def _next_probe(subscription: Subscription, now: float) -> float:
    """Return when to look after a stream that is silent from now on, on the loop's clock."""
    at = now + PROBE_S
    return min(at, subscription.deadline) if subscription.deadline > now else at


class ReaderPool:
    """The readers of one client: as few as its streams need, by partition."""

    def __init__(self, *, reconnect_s: float) -> None:
        self._reconnect_s = reconnect_s
        self._readers: dict[int, list[StreamReader]] = {}

    def follow(
        self, subscription: Subscription, server: RedisServer, keys: QueueKeys, probe: Probe
    ) -> None:
        """Give a subscription to a reader that has room, or to a new one."""
        readers = [r for r in self._readers.get(keys.partition, ()) if r.is_serving]
        self._readers[keys.partition] = readers
        reader = next((r for r in readers if r.has_room), None)
        if reader is None:
            reader = StreamReader(server, keys, probe, reconnect_s=self._reconnect_s)
            readers.append(reader)
        reader.add(subscription)

    async def aclose(self) -> None:
        """Stop all readers."""
        readers = [reader for group in self._readers.values() for reader in group]
        self._readers.clear()
        await asyncio.gather(*(reader.aclose() for reader in readers))
