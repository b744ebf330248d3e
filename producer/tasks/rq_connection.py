"""RQ's connection: plain redis-py, to wherever the server of the tasks' keys is now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from redis import Connection, ConnectionPool, Redis, SSLConnection
from redis.backoff import ExponentialBackoff
from redis.connection import parse_url
from redis.exceptions import ConnectionError, TimeoutError  # noqa: A004 - redis's own
from redis.retry import Retry

from inferq.protocol.keys import TaskKeys
from inferq.protocol.servers import Address, ServerUrl

#: Longest time in seconds to connect.
CONNECT_TIMEOUT_S: Final = 2.0
#: Longest time in seconds for a reply; RQ's workers, which wait for tasks, raise it for themselves.
REPLY_TIMEOUT_S: Final = 5.0


class _FoundConnection(Connection):
    """Asks where the server is whenever it is made."""

    def __init__(self, *, find: Callable[[], Address], **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._find = find

    def _connect(self) -> Any:
        self.host, self.port = self._find()
        return super()._connect()  # type: ignore[no-untyped-call]


class _FoundSSLConnection(_FoundConnection, SSLConnection):
    """The same with TLS."""


def rq_connection(url: ServerUrl) -> Redis:
    """Return a client for RQ; nothing is connected yet.

    Behind Sentinels and in a Cluster each connection asks where to go, from a thread without a
    running event loop: all keys of tasks share one slot, so one node at a time is enough.
    """
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": REPLY_TIMEOUT_S,
        "health_check_interval": 30,
        "retry": Retry(ExponentialBackoff(cap=0.5, base=0.05), 3),
        "retry_on_error": [ConnectionError, TimeoutError],
        **parse_url(url.plain),  # type: ignore[no-untyped-call]
    }
    if url.kind == "standalone":
        return Redis(connection_pool=ConnectionPool(**options))
    kind = options.pop("connection_class", Connection)
    options |= {"host": "", "port": 0, "find": lambda: asyncio.run(url.locate(TaskKeys.PREFIX))}
    found = _FoundSSLConnection if kind is SSLConnection else _FoundConnection
    return Redis(connection_pool=ConnectionPool(connection_class=found, **options))
