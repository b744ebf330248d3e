"""Writes what the engine's blocks hold, while somebody looks; else does nothing."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog
from redis.asyncio import Redis

from inferq.protocol.errors import QueueFull, ServerLost
from inferq.protocol.keys import QueueKeys
from inferq.protocol.watching import write_snapshot
from inferq.worker.pipe.engine_client import EngineClient

logger = structlog.get_logger("inferq.worker")

#: Seconds between two snapshots, at least.
INTERVAL_S: Final = 1.0
#: Most bytes of snapshots written in a second; larger ones come less often.
BYTES_PER_S: Final = 2 * 2**20
#: Share of the engine's time that snapshots take at most; larger pools have them less often.
ENGINE_SHARE: Final = 0.02
#: How long a snapshot lives, in intervals.
LIVES: Final = 5


class Snapshots:
    """Writes one snapshot after another from `watch(True)` to `watch(False)`."""

    def __init__(self, client: Redis, keys: QueueKeys, worker: str, engine: EngineClient) -> None:
        self._redis = client
        self._keys = keys
        self._worker = worker
        self._engine = engine
        self._watched = asyncio.Event()

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks."""
        return self._watched.is_set()

    def watch(self, is_watched: bool) -> None:
        """Begin or end."""
        if is_watched:
            self._watched.set()
        else:
            self._watched.clear()

    async def run(self) -> None:
        """Write until cancelled; a step that hangs has no snapshot."""
        while True:
            await self._watched.wait()
            seconds, snapshot = await self._engine.block_snapshot()
            pause = max(INTERVAL_S, len(snapshot) / BYTES_PER_S, seconds / ENGINE_SHARE)
            try:
                await write_snapshot(
                    self._redis,
                    self._keys,
                    self._worker,
                    snapshot,
                    lives_ms=round(LIVES * pause * 1000),
                )
            except (ServerLost, QueueFull) as error:
                logger.warning("snapshot not written", error=str(error))
            await asyncio.sleep(pause)
