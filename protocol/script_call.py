"""One call of a Lua script: by its digest, or whole to a server that does not have it yet."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import redis.asyncio
from redis.exceptions import NoScriptError


def digest_of(text: str) -> str:
    """Return the SHA-1 by which a server knows a script."""
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


async def call_script(
    client: redis.asyncio.Redis,
    script: tuple[str, str],
    keys: Sequence[str],
    arguments: Sequence[str | bytes | int | float],
) -> Any:
    """Run a script, given as its text and digest, and return its reply; raises what redis does."""
    text, sha = script
    try:
        return await client.evalsha(sha, len(keys), *keys, *arguments)
    except NoScriptError:
        return await client.eval(text, len(keys), *keys, *arguments)
