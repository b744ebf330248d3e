"""The edge to redis: its errors as inferq's, without a password in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    ConnectionError,  # noqa: A004 - the builtin of this name is not what redis raises
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,  # noqa: A004
)

from inferq.protocol.errors import QueueFull, ServerLost


@contextmanager
def translate_errors(client: Any) -> Iterator[None]:
    """Turn the errors of a redis `client` (sync or asyncio) into `ServerLost` or `QueueFull`.

    `QueueFull` is the server's refusal to write for want of memory. Other errors pass: they are
    faults of ours.
    """
    try:
        yield
    except (AuthenticationError, NoPermissionError) as error:
        raise ServerLost(f"Redis at {_address(client)} refuses us: {error}") from error
    except TimeoutError as error:
        raise ServerLost(f"Redis at {_address(client)} does not answer: {error}") from error
    except (ConnectionError, ReadOnlyError, ClusterDownError) as error:
        raise ServerLost(f"cannot reach Redis at {_address(client)}: {error}") from error
    except ResponseError as error:
        # Redis 6.2 wraps what a script could not do in its own words.
        if not isinstance(error, OutOfMemoryError) and "OOM command" not in str(error):
            raise
        raise QueueFull(f"Redis at {_address(client)} is out of memory") from error


def decodes_responses(client: Any) -> bool:
    """Whether a redis `client` (sync or asyncio, standalone or cluster) gives text for bytes."""
    return bool(_connection_options(client).get("decode_responses"))


def _connection_options(client: Any) -> dict[str, Any]:
    pool = getattr(client, "connection_pool", client)
    options: dict[str, Any] = getattr(pool, "connection_kwargs", {})
    return options


def _address(client: Any) -> str:
    where = _connection_options(client)
    if "path" in where:
        return str(where["path"])
    return f"{where.get('host', 'localhost')}:{where.get('port', 6379)}"
