"""The partitions of a queue: how many there are, where each lives, and which one a job goes to."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from redis.crc import key_slot

from inferq.producer.server import RedisServer
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import DEFAULT_QUEUE, MAX_PARTITIONS, QueueKeys
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.servers import DEFAULT_URL, ServerUrl


class Partitions:
    """Connections to one queue: of a Cluster to each partition's own node, else to one server.

    None takes `$INFERQ_REDIS_URL`, `$INFERQ_QUEUE` and `$INFERQ_PARTITIONS`, or the local server,
    `default` and 1. `timeout_s` bounds one command with its retries. Connects when first used.
    """

    def __init__(
        self, url: str | None, queue: str | None, number: int | None, *, timeout_s: float
    ) -> None:
        if not isinstance(queue, str | None):
            raise InvalidRequestError(f"must be a name, not {type(queue).__name__}", field="queue")
        with _chosen(queue, "INFERQ_QUEUE", DEFAULT_QUEUE) as self.queue:
            QueueKeys(self.queue)  # refuses a bad name here, not at the first call
        self.number = to_num_partitions(number)
        with _chosen(url, "INFERQ_REDIS_URL", DEFAULT_URL) as text:
            self._url = ServerUrl.parse(text)
        self._timeout_s = timeout_s
        #: By hash slot; of one server there is one.
        self._servers: dict[int, RedisServer] = {}
        self._scripts: dict[int, QueueScripts] = {}

    @property
    def name(self) -> str:
        """The server's address without credentials."""
        return self._url.name

    def server(self, partition: int) -> RedisServer:
        """Return the connections to the server that a partition lives on."""
        return self.server_of(QueueKeys(self.queue, partition).prefix)

    def server_of(self, slot_key: str) -> RedisServer:
        """Return the connections to the server of the keys with `slot_key`'s hash tag."""
        place = key_slot(slot_key.encode()) if self._url.kind == "cluster" else 0
        if place not in self._servers:
            self._servers[place] = RedisServer(self._url, slot_key, timeout_s=self._timeout_s)
        return self._servers[place]

    def scripts(self, partition: int) -> QueueScripts:
        """Return a partition's operations, to be called through its `server`."""
        if partition not in self._scripts:
            commands = self.server(partition).commands
            self._scripts[partition] = QueueScripts(commands, QueueKeys(self.queue, partition))
        return self._scripts[partition]

    async def aclose(self) -> None:
        """Close all connections."""
        for server in self._servers.values():
            await server.aclose()


@contextmanager
def _chosen(given: str | None, variable: str, default: str) -> Iterator[str]:
    """Yield what was given, else the variable; an error in it names the variable if it is that.

    An empty one is not taken for one that was left out: the job would go to another queue.
    """
    if given is not None or variable not in os.environ:
        yield default if given is None else given
        return
    try:
        yield os.environ[variable]
    except InvalidRequestError as error:
        raise error.of_field(variable) from None


def to_num_partitions(given: int | None) -> int:
    """Return the number given, else `$INFERQ_PARTITIONS`, else 1, if it is in [1, 1024]."""
    field, value, given_as = "partitions", given, repr(given)
    if value is None:
        text = os.environ.get("INFERQ_PARTITIONS")
        if text is None:
            return 1
        field, given_as = "INFERQ_PARTITIONS", text or "empty"
        value = int(text) if text.isascii() and text.isdigit() else 0
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 1 <= value <= MAX_PARTITIONS:
        raise InvalidRequestError(
            f"must be a whole number in [1, {MAX_PARTITIONS}], not {given_as}",
            field=field,
            limit=MAX_PARTITIONS,
        )
    return value


def choose_partition(num_partitions: int, idempotency_key: str | None) -> int:
    """Return the partition of a new job: any, but for one idempotency key always the same."""
    if idempotency_key is None:
        return secrets.randbelow(num_partitions)
    return zlib.crc32(idempotency_key.encode()) % num_partitions
