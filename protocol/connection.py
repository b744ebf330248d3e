"""The edge to redis: its errors as inferq's, without a password in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,  # noqa: A004 - the builtin of this name is not what redis raises
    InvalidResponse,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004
    TryAgainError,
)

from inferq.protocol.errors import InferqError, QueueFull, ServerLost

#: What the server cannot do now and another time may, by the code of its reply.
_TRANSIENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "BUSY": "is busy with a script that does not end",
        "CLUSTERDOWN": "belongs to a Cluster that is down",
        "LOADING": "is still loading its data",
        "MASTERDOWN": "is a replica that has lost its primary",
        "MISCONF": "takes no writes, because it cannot save its data to disk",
        "NOREPLICAS": "takes no writes, because too few replicas are connected",
        "READONLY": "is a read-only replica: point redis_url at the primary",
        "TRYAGAIN": "is moving the keys to another node",
        "UNBLOCKED": "has become a replica",
    }
)
_REFUSALS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "MOVED": "belongs to a Cluster: use its redis+cluster:// URL",
        "NOAUTH": "refuses us: it needs a password",
        "NOPERM": "refuses us: the user of redis_url lacks a permission",
        "WRONGPASS": "refuses us: the user name or the password is wrong",
    }
)
#: Replies without a code of their own. The second is what a client that has not authenticated
#: gets for a long command; the third is how Redis 6.2 words NOPERM inside a script.
_WORDINGS: Final = (
    (
        re.compile(r"invalid DB index|DB index is out of range", re.I),
        "refuses us: no such database",
    ),
    (re.compile(r"unauthenticated (multibulk|bulk) length", re.I), _REFUSALS["NOAUTH"]),
    (
        re.compile(r"The user executing the script can't|ACL failure in script", re.I),
        _REFUSALS["NOPERM"],
    ),
    (re.compile(r"'auth' command|AUTH <password> called", re.I), "refuses us"),
)
#: Redis 6.2 wraps what a script could not do in its own words, with the code inside.
_WRAPPED_CODE: Final = re.compile(r"^(?:ERR )?Error running script.*?: -([A-Z]+) ", re.S)
_OUT_OF_MEMORY: Final = "OOM"
#: redis-py cuts the codes that it knows from the message; the subclass before its base.
_CODE_OF: Final[Mapping[type[RedisError], str]] = MappingProxyType(
    {
        BusyLoadingError: "LOADING",
        MasterDownError: "MASTERDOWN",
        ClusterDownError: "CLUSTERDOWN",
        NoPermissionError: "NOPERM",
        OutOfMemoryError: _OUT_OF_MEMORY,
        ReadOnlyError: "READONLY",
        TryAgainError: "TRYAGAIN",
        MovedError: "MOVED",
        AskError: "ASK",
    }
)


@contextmanager
def translate_errors(client: Any) -> Iterator[None]:
    """Turn the errors of a redis `client` (sync or asyncio) into `ServerLost` or `QueueFull`.

    `QueueFull` is the server's refusal to write for want of memory. Other errors pass: they are
    faults of ours.
    """
    try:
        yield
    except RedisError as error:
        translated = _translated(error, f"Redis at {_address(client)}")
        if translated is None:
            raise
        raise translated from error


def decodes_responses(client: Any) -> bool:
    """Whether a redis `client` (sync or asyncio, standalone or cluster) gives text for bytes."""
    return bool(_connection_options(client).get("decode_responses"))


def _translated(error: RedisError, server: str) -> InferqError | None:
    """Return the error as ours; None for a fault of ours."""
    code = reply_code(error)
    if code == _OUT_OF_MEMORY or "OOM command" in str(error):
        return QueueFull(f"{server} is out of memory")
    if code in _TRANSIENT:
        return ServerLost(f"{server} {_TRANSIENT[code]}")
    if code in _REFUSALS:
        return ServerLost(f"{server} {_REFUSALS[code]} ({error})", is_refusal=True)
    for wording, meaning in _WORDINGS:
        if wording.search(str(error)):
            return ServerLost(f"{server} {meaning} ({error})", is_refusal=True)
    if isinstance(error, TimeoutError):
        return ServerLost(f"{server} does not answer: {error}")
    if isinstance(error, InvalidResponse):
        return ServerLost(f"{server} does not speak Redis' protocol: {error}")
    if isinstance(error, ConnectionError):
        return ServerLost(f"cannot reach {server}: {error}")
    return None


def reply_code(error: RedisError) -> str:
    """Return the code of an error reply; the first word of one without, nothing of no reply."""
    for kind, code in _CODE_OF.items():
        if isinstance(error, kind):
            return code
    text = str(error)
    if isinstance(error, AuthenticationError):
        # One class for both; NOAUTH has two texts (the other answers HELLO), WRONGPASS many.
        return "NOAUTH" if re.search("required|already authenticated", text) else "WRONGPASS"
    if not isinstance(error, ResponseError):
        return ""
    if wrapped := _WRAPPED_CODE.match(text):
        return wrapped[1]
    return text.split(" ", 1)[0]


def _connection_options(client: Any) -> dict[str, Any]:
    pool = getattr(client, "connection_pool", client)
    options: dict[str, Any] = getattr(pool, "connection_kwargs", {})
    return options


def _address(client: Any) -> str:
    where = _connection_options(client)
    if "path" in where:
        return str(where["path"])
    if "router" in where:
        return str(where["router"].name)
    return f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"
