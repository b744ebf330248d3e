"""Looking at a queue's workers: the mark that somebody does, and the snapshots it brings.

Clients are those of `QueueScripts`, which do not decode responses.
"""

from __future__ import annotations

from typing import Final

from redis.asyncio import Redis

from inferq.protocol.connection import translate_errors
from inferq.protocol.keys import QueueKeys
from inferq.protocol.snapshots import BlockSnapshot

#: How long, in ms, workers count as watched after somebody looked.
WATCH_MARK_MS: Final = 10_000


async def mark_watched(client: Redis, keys: QueueKeys) -> None:
    """Have the partition's workers write snapshots for a while, from their next heartbeat on."""
    with translate_errors(client):
        await client.set(keys.watch, 1, px=WATCH_MARK_MS)


async def write_snapshot(
    client: Redis, keys: QueueKeys, worker: str, snapshot: bytes, *, lives_ms: int
) -> None:
    """Write a worker's encoded snapshot over the one before."""
    with translate_errors(client):
        await client.set(keys.blocks(worker), snapshot, px=lives_ms)


async def read_snapshot(client: Redis, keys: QueueKeys, worker: str) -> BlockSnapshot | None:
    """Return a worker's last snapshot; None where there is none of the last seconds.

    Raises `DecodeError` for one that cannot be read.
    """
    with translate_errors(client):
        found = await client.get(keys.blocks(worker))
    return BlockSnapshot.decode(found) if isinstance(found, bytes) else None
