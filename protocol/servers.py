"""Clients of a standalone server, of the primary that Sentinels name, or of a Cluster's node.

A partition lives in one Cluster slot, so each client needs one server at a time: a plain
client whose connections ask, whenever they are made, where that server is now. A server that says
it is the wrong one is asked about again; to the caller all that is a lost connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio import (
    Connection,
    ConnectionPool,
    Redis,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    ConnectionError,  # noqa: A004 - the builtin of this name is not what redis raises
    RedisError,
)

from inferq.protocol.connection import reply_code
from inferq.protocol.errors import InvalidRequestError

#: The server on this machine.
DEFAULT_URL: Final = "redis://127.0.0.1:6379/0"
#: Longest wait in seconds for a Sentinel or a node to say where a server is.
LOOK_UP_TIMEOUT_S: Final = 1.0
FORM: Final = (
    "must be redis://, rediss:// (TLS) or unix:// with [user:password@]host[:port][/database], "
    "redis+sentinel://[user:password@]host[:port][,…]/service[/database] or "
    "redis+cluster://[user:password@]host[:port][,…] (rediss+… with TLS), and with no ?options but "
    "those of redis-py"
)

_PLAIN: Final = ("redis", "rediss", "unix")
_ROUTED: Final = re.compile(r"(rediss?)\+(sentinel|cluster)")
_DEFAULT_PORTS: Final = {"sentinel": 26379, "cluster": 6379}
#: Replies of a server that is not, or no longer, the one to talk to.
_WRONG_SERVER: Final = frozenset(
    {"MOVED", "ASK", "READONLY", "CLUSTERDOWN", "MASTERDOWN", "UNBLOCKED"}
)
_NODE: Final = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>\d{1,5}))?")

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """A checked URL; `name` shows it without user, password or options."""

    name: str
    #: "standalone", "sentinel" or "cluster".
    kind: str
    #: The URL itself, or what a connection takes besides the address, as a URL of a single server.
    plain: str = field(repr=False)
    nodes: tuple[Address, ...] = ()
    #: What the Sentinels call the primary.
    service: str = ""
    sentinel_options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, url: str) -> ServerUrl:
        """Check a URL; raise `InvalidRequestError`, without the password, for what is none."""
        try:
            parts = urlsplit(url)
            scheme = parts.scheme
            if scheme in _PLAIN:
                _check_options(url)
                return cls(_plain_name(url), "standalone", url)
            if routed := _ROUTED.fullmatch(scheme):
                return _parse_routed(url, *routed.groups())
        except (ValueError, AttributeError, TypeError, RedisError):
            pass
        # no `from`: the cause would show the password
        raise InvalidRequestError(FORM, field="url")

    def client(self, slot_key: str, *, single_connection: bool = False, **options: Any) -> Redis:
        """Return a client for the keys that share `slot_key`'s hash tag.

        `options` are those of redis-py's connections. Nothing is connected yet.
        """
        given: dict[str, Any] = options | dict(parse_url(self.plain))
        kind = given.pop("connection_class", Connection)
        if kind is not UnixDomainSocketConnection:
            given["socket_keepalive"] = True
        if self.kind == "standalone":
            pool = ConnectionPool(connection_class=_FIXED[kind], **given)
        else:
            given |= {"host": "", "port": 0}
            given["router"] = self._router(slot_key, given, is_tls=kind is SSLConnection)
            pool = ConnectionPool(connection_class=_ROUTED_TO[kind], **given)
        client = Redis(connection_pool=pool, single_connection_client=single_connection)
        client.auto_close_connection_pool = True
        return client

    async def locate(self, slot_key: str) -> Address:
        """Return where Sentinels or a Cluster say that the server of `slot_key`'s keys is now.

        Raises redis' `ConnectionError` if nobody can say.
        """
        given: dict[str, Any] = dict(parse_url(self.plain))
        is_tls = given.pop("connection_class", Connection) is SSLConnection
        return await self._router(slot_key, given, is_tls=is_tls).address()

    def _router(self, slot_key: str, options: dict[str, Any], *, is_tls: bool) -> Router:
        tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
        tls["ssl"] = is_tls
        if self.kind == "sentinel":
            asked = {**tls, **dict(self.sentinel_options)}
            return SentinelRouter(self.name, self.nodes, self.service, asked)
        login: dict[str, Any] = {
            name: options[name] for name in ("username", "password") if name in options
        }
        return ClusterRouter(self.name, self.nodes, key_slot(slot_key.encode()), {**tls, **login})


class Router(Protocol):
    """Knows where the server is that a client needs; `name` is for people."""

    @property
    def name(self) -> str:
        """Say what is connected to."""
        ...

    async def address(self) -> Address:
        """Return the server's address; raise redis' `ConnectionError` if nobody can say."""
        ...

    def forget(self) -> None:
        """Take notice that the server has become the wrong one."""
        ...


class SentinelRouter:
    """The primary of one service; the Sentinels are asked for every connection."""

    def __init__(
        self, name: str, nodes: tuple[Address, ...], service: str, options: dict[str, Any]
    ) -> None:
        self.name = name
        self._service = service
        self._nodes = nodes
        self._options = options

    async def address(self) -> Address:
        """Ask the Sentinels, one after the other."""
        sentinel = Sentinel(  # type: ignore[no-untyped-call]
            self._nodes,
            sentinel_kwargs=_look_up_options() | self._options,
        )
        try:
            host, port = await sentinel.discover_master(self._service)
        except MasterNotFoundError:
            # no `from`: redis shows every option of every connection in it
            raise ConnectionError(
                f"no Sentinel names a primary of {self._service!r}: they cannot be reached, refuse "
                "us, or do not know it"
            ) from None
        finally:
            for asked in sentinel.sentinels:
                await asked.aclose()
        return host, port

    def forget(self) -> None:
        """Nothing is kept."""


class ClusterRouter:
    """The node that serves one slot; found again when it says that it has moved."""

    def __init__(
        self, name: str, nodes: tuple[Address, ...], slot: int, options: dict[str, Any]
    ) -> None:
        self.name = name
        self._seeds = nodes
        #: Every node that the Cluster named, for when the seeds are gone.
        self._known: list[Address] = list(nodes)
        self._slot = slot
        self._options = options
        self._found: Address | None = None

    async def address(self) -> Address:
        """Return the node found last; else ask one node after the other for the slots."""
        if self._found is not None:
            # Asked again by the next one, unless this one succeeds: a dead node tells nobody.
            found, self._found = self._found, None
            return found
        failure: Exception | None = None
        for node in list(self._known):
            try:
                return await self._ask(node)
            except (RedisError, OSError) as error:
                failure = error
        raise ConnectionError(
            f"no node of {self.name} says who serves slot {self._slot}: {failure}"
        )

    async def _ask(self, node: Address) -> Address:
        host, port = node
        async with Redis(
            host=host,
            port=port,
            **(_look_up_options() | self._options),
        ) as client:
            ranges: Any = await client.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
        owners = _slot_owners(ranges, host)
        # The one that answered first: the next look-up shall not wait for dead ones again.
        known = (node, *self._seeds, *(owner for _, _, owner in owners))
        self._known = list(dict.fromkeys(known))
        for first, last, owner in owners:
            if first <= self._slot <= last:
                return owner
        raise ConnectionError(f"{self.name} has no node for slot {self._slot}")

    def forget(self) -> None:
        """Ask again."""
        self._found = None

    def keep(self, address: Address) -> None:
        """Use this node, which answered, for the next connection too."""
        self._found = address


class _WaryConnection(AbstractConnection):
    """A connection that ends when the server says that it is the wrong one."""

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Read one; the next call after such a reply connects anew, perhaps to another server."""
        try:
            return await super().read_response(*args, **options)
        except RedisError as error:
            if reply_code(error) in _WRONG_SERVER:
                await self._leave(error)
            raise

    async def _leave(self, error: RedisError) -> None:  # noqa: ARG002 - for who looks elsewhere
        await self.disconnect()


class _FixedConnection(_WaryConnection, Connection):
    """One to a fixed host; its name, or a proxy, may lead to another server the next time."""


class _FixedSSLConnection(_FixedConnection, SSLConnection):
    """The same with TLS."""


class _FixedUnixConnection(_WaryConnection, UnixDomainSocketConnection):
    """The same by a socket of this machine."""


class _RoutedConnection(_WaryConnection, Connection):
    """A connection that asks its router for the address whenever it is made."""

    def __init__(self, *, router: Router, **options: Any) -> None:
        super().__init__(**options)
        self._router = router

    async def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        """Find the server, then connect as usual."""
        if self.is_connected:
            return
        self.host, self.port = address = await self._router.address()
        await super().connect_check_health(check_health, retry_socket_connect)
        if isinstance(self._router, ClusterRouter):
            self._router.keep(address)

    async def _leave(self, error: RedisError) -> None:
        self._router.forget()
        await super()._leave(error)
        raise ConnectionError(f"the server has changed its part: {error}") from error


class _RoutedSSLConnection(_RoutedConnection, SSLConnection):
    """The same with TLS."""


_FIXED: Final[Mapping[type[AbstractConnection], type[AbstractConnection]]] = MappingProxyType(
    {
        Connection: _FixedConnection,
        SSLConnection: _FixedSSLConnection,
        UnixDomainSocketConnection: _FixedUnixConnection,
    }
)
_ROUTED_TO: Final[Mapping[type[AbstractConnection], type[AbstractConnection]]] = MappingProxyType(
    {Connection: _RoutedConnection, SSLConnection: _RoutedSSLConnection}
)


def _look_up_options() -> dict[str, Any]:
    # The caller's time is for all nodes together: one that is dead is asked once.
    return {
        "socket_timeout": LOOK_UP_TIMEOUT_S,
        "socket_connect_timeout": LOOK_UP_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
    }


def _slot_owners(ranges: Any, asked_host: str) -> list[tuple[int, int, Address]]:
    """Read CLUSTER SLOTS: first and last slot with its primary; no host is that of the one asked.

    redis-py may have parsed the reply into a map of ranges.
    """
    owners = []
    if isinstance(ranges, dict):
        for (first, last), nodes in ranges.items():
            host, port = nodes["primary"][:2]
            owners.append((int(first), int(last), (_text(host) or asked_host, int(port))))
        return owners
    for first, last, primary, *_ in ranges:
        owners.append((int(first), int(last), (_text(primary[0]) or asked_host, int(primary[1]))))
    return owners


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def _check_options(url: str) -> None:
    pool = ConnectionPool.from_url(url)
    pool.connection_class(**pool.connection_kwargs)  # refuses options; connects to nothing yet


def _plain_name(url: str) -> str:
    parts = urlsplit(url)
    host, port = parts.hostname, parts.port
    if parts.scheme == "unix":
        if len(parts.path) < 2:
            raise ValueError("no path")
        return f"unix://{parts.path}"
    if not re.fullmatch(r"(/\d*)?", parts.path, re.ASCII):
        raise ValueError("not a database")  # or redis would take database 0
    return f"{parts.scheme}://{host or 'localhost'}:{port or 6379}{parts.path}"


def _parse_routed(url: str, scheme: str, kind: str) -> ServerUrl:
    parts = urlsplit(url)
    login, at, hosts = parts.netloc.rpartition("@")
    nodes = tuple(_parse_node(text, _DEFAULT_PORTS[kind]) for text in hosts.split(","))
    service, _, database = unquote(parts.path).strip("/").partition("/")
    if kind == "cluster" and service:
        raise ValueError("a Cluster has one database")
    if kind == "sentinel" and not service:
        raise ValueError("no service")
    if database and not re.fullmatch(r"\d+", database, re.ASCII):
        raise ValueError("not a database")
    query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    sentinel = tuple(
        (n.removeprefix("sentinel_"), v) for n, v in query if n.startswith("sentinel_")
    )
    rest = urlencode([(n, v) for n, v in query if not n.startswith("sentinel_")])
    plain = f"{scheme}://{login}{at}routed:1/{database}" + (f"?{rest}" if rest else "")
    _check_options(plain)
    shown = ",".join(f"{host}:{port}" for host, port in nodes)
    name = f"{parts.scheme}://{shown}" + (f"/{service}" if service else "")
    return ServerUrl(name, kind, plain, nodes, service, sentinel)


def _parse_node(text: str, default_port: int) -> Address:
    match = _NODE.fullmatch(text)
    if match is None:
        raise ValueError("not a host")
    port = int(match["port"] or default_port)
    if not 0 < port < 65536:
        raise ValueError("not a port")
    return match["v6"] or match["host"], port
