"""One call of a Lua script: by its digest, or whole to a server that does not have it yet."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import redis.asyncio
from redis.exceptions import NoScriptError


@cache
def read_script(package: str, *names: str) -> tuple[str, str]:
    """Return a script's text, of one or more `.lua` files of a package, and its SHA-1.

    That is the name by which a server knows it.
    """
    folder = files(package)
    text = "\n".join(folder.joinpath(f"{name}.lua").read_text() for name in names)
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


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
