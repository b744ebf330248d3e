"""Questions to a server that its user may lack the right to ask, or that it may not know."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from inferq.producer.server import RedisServer
from inferq.protocol.errors import InferqError, ServerLost

T = TypeVar("T")


async def permitted(server: RedisServer, operation: Callable[[], Awaitable[T]]) -> T | None:
    """Return an answer, None where it is refused or unknown; raises `ServerLost` otherwise."""
    try:
        return await server.call(operation)
    except ServerLost as error:
        if error.is_refusal:
            return None
        raise
    except InferqError:
        return None


async def hello(server: RedisServer) -> dict[str, str]:
    """Return what the server says of itself: by HELLO, which every user may call, else by INFO."""
    reply = await permitted(server, functools.partial(_command, server, "HELLO", "2"))
    if reply is None:
        info: Any = await permitted(server, functools.partial(_info, server))
        return {"version": str((info or {}).get("redis_version", ""))}
    texts = [part.decode() if isinstance(part, bytes) else str(part) for part in reply]
    return dict(zip(texts[::2], texts[1::2], strict=False))


async def info(server: RedisServer) -> dict[str, Any] | None:
    """Return all that INFO tells, None where the user may not ask."""
    return await permitted(server, functools.partial(_info, server))


async def setting(server: RedisServer, name: str) -> str | None:
    """Return a setting of the server, None where the user may not ask, or there is none."""
    found: Any = await permitted(server, functools.partial(_call, server.commands.config_get, name))
    return None if not found or name not in found else str(found[name])


async def _command(server: RedisServer, *parts: str) -> Any:
    return await server.commands.execute_command(*parts)  # type: ignore[no-untyped-call]


async def _info(server: RedisServer) -> dict[str, Any]:
    found: dict[str, Any] = await server.commands.info()
    return found


async def _call(ask: Callable[[str], Awaitable[Any]], name: str) -> Any:
    return await ask(name)
