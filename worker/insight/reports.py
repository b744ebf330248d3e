"""Tells the queue what this worker has, and does what the queue's answer asks."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Mapping
from typing import Any, Final

import structlog

from inferq.protocol.errors import QueueFull, ServerLost
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.task_ends import end_tasks
from inferq.version import __version__
from inferq.worker.insight.snapshots import Snapshots
from inferq.worker.jobs.books import JobBooks
from inferq.worker.pipe.engine_client import EngineClient, EngineInfo
from inferq.worker.queue.outage import REMINDER_S, Outage
from inferq.worker.settings import WorkerSettings

logger = structlog.get_logger("inferq.worker")

#: Seconds between two sweeps of the queue.
SWEEP_INTERVAL_S: Final = 60.0
#: Milliseconds without a report after which a worker is gone; reports come at least every minute.
GONE_AFTER_MS: Final = 300_000
#: Most seconds between two reports while somebody watches.
WATCHED_INTERVAL_S: Final = 1.0


class Reporter:
    """Reports every `report_interval_s`, more often while watched, and now and then sweeps up."""

    def __init__(
        self,
        settings: WorkerSettings,
        scripts: QueueScripts,
        engine: EngineClient,
        info: EngineInfo,
        snapshots: Snapshots,
        books: JobBooks,
    ) -> None:
        self._settings = settings
        self._scripts = scripts
        self._engine = engine
        self._info = info
        self._snapshots = snapshots
        self._books = books
        self._rates = TokenRates()
        self._swept_at = time.monotonic()
        self._end = asyncio.Event()
        self._outage = Outage(logger, "report")
        #: Which process of this worker's name it is.
        self._process = secrets.token_hex(8)
        self._has_reported = False
        self._contested_at = -REMINDER_S
        #: Whether the last report succeeded.
        self.is_connected = True

    def end(self) -> None:
        """Have `run` return after the report under way.

        One that is cut off may reach the server after what the worker does next.
        """
        self._end.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Report until ended, at once when `stop` is set; set it when asked to drain."""
        while not self._end.is_set():
            is_draining = stop.is_set()
            promised_s = self._interval_s
            try:
                await self._report(stop)
                self.is_connected = True
                self._outage.succeeded()
            except (ServerLost, QueueFull) as error:
                self.is_connected = False
                self._snapshots.watch(False)
                self._outage.failed(error)
            # never later than that report said, or the worker would count as late
            pause_s = min(promised_s, self._interval_s)
            news = (self._end,) if is_draining else (self._end, stop)
            waits = [asyncio.create_task(event.wait()) for event in news]
            try:
                await asyncio.wait(waits, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks(waits)

    @property
    def _interval_s(self) -> float:
        interval_s = self._settings.report_interval_s
        return min(interval_s, WATCHED_INTERVAL_S) if self._snapshots.is_watched else interval_s

    async def _report(self, stop: asyncio.Event) -> None:
        state = self._state(is_draining=stop.is_set())
        reply = await self._scripts.register(self._settings.worker_name, state)
        self._snapshots.watch(reply.watched)
        if reply.contested and self._has_reported:
            self._tell_contested()
        self._has_reported = True
        if reply.drain and not stop.is_set():
            logger.info("asked to drain")
            stop.set()
        if time.monotonic() > self._swept_at + SWEEP_INTERVAL_S:
            self._swept_at = time.monotonic()
            swept = await self._scripts.sweep(gone_ms=GONE_AFTER_MS)
            logger.debug("swept", **dataclasses.asdict(swept))

    def _tell_contested(self) -> None:
        now = time.monotonic()
        if now >= self._contested_at + REMINDER_S:
            self._contested_at = now
            logger.error(
                "another process has this worker's name; each hands back the other's jobs",
                advice="give every worker a name of its own (--worker-name)",
            )

    def _state(self, *, is_draining: bool) -> dict[str, Any]:
        stats, blocks = self._engine.stats, self._info.num_blocks
        prompt_tokens = self._books.prompt_tokens
        generated_tokens = self._books.generation_tokens
        return {
            "model": self._settings.model_name,
            "adapters": list(self._settings.lora_adapters or ()),
            "version": __version__,
            "process": self._process,
            "blocks": blocks,
            "block_size": self._info.block_size,
            "max_model_len": self._info.max_model_len,
            "free": stats.get("free", blocks),
            **_counts(stats, ("cached", "peak", "swap_blocks", "swap_blocks_used")),
            **_counts(stats, ("running", "waiting", "swapped")),
            **_counts(stats, ("preemptions", "prefix_queries", "prefix_hits")),
            "prompt_tokens": prompt_tokens,
            "generated_tokens": generated_tokens,
            "rates": self._rates.since_last(prompt_tokens, generated_tokens),
            "every": round(self._interval_s * 1000),
            "draining": is_draining,
        }


class TokenRates:
    """Turns counts of tokens into tokens per second."""

    def __init__(self) -> None:
        self._last: tuple[int, ...] = ()
        self._at = time.monotonic()

    def since_last(self, *counts: int) -> list[float]:
        """Return how fast each count has grown since the last call; 0 at the first."""
        now = time.monotonic()
        seconds = max(now - self._at, 1e-3)
        last = self._last or counts
        self._last, self._at = counts, now
        return [
            round((count - before) / seconds, 1) for count, before in zip(counts, last, strict=True)
        ]


def _counts(stats: Mapping[str, int], names: tuple[str, ...]) -> dict[str, int]:
    return {name: stats.get(name, 0) for name in names}
