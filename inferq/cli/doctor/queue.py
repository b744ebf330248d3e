"""A queue's health: who serves it, what waits too long, what nobody could serve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

from inferq.cli.doctor.findings import Area, Finding
from inferq.producer import QueueAdmin
from inferq.producer.workers import WorkerInfo
from inferq.protocol.replies import QueueOverview
from inferq.version import __version__

_AREA: Final = Area("queue")
#: Wait in ms from which on a queue is behind.
_LONG_WAIT_MS: Final = 60_000
_MOST_NAMES: Final = 5


async def examine(admin: QueueAdmin) -> list[Finding]:
    """Look at a queue, its partitions together."""
    overview, workers = await asyncio.gather(admin.overview(), admin.workers())
    alive = [worker for worker in workers if worker.is_alive]
    return [
        _served(admin, overview, alive),
        *_gone(workers),
        *_mixed(alive),
        _oldest(overview, alive),
        _dead_letters(overview),
    ]


def _served(admin: QueueAdmin, overview: QueueOverview, alive: Sequence[WorkerInfo]) -> Finding:
    unserved = sorted(set(range(admin.num_partitions)) - {worker.partition for worker in alive})
    waiting = overview.load.queued + overview.load.delayed
    if not unserved:
        return _AREA.ok("workers", f"{len(alive)} alive, {waiting} jobs wait")
    where = f"queue {admin.queue}"
    if admin.num_partitions > 1:
        where += f", partitions {', '.join(map(str, unserved[:_MOST_NAMES]))}"
    advice = f"start one: inferq worker --queue {admin.queue} --model MODEL"
    if waiting:
        return _AREA.failure("workers", f"none alive ({where}), and {waiting} jobs wait", advice)
    return _AREA.warning("workers", f"none alive ({where})", advice)


def _gone(workers: Sequence[WorkerInfo]) -> Iterator[Finding]:
    gone = [worker.name for worker in workers if not worker.is_alive]
    if gone:
        more = f" and {len(gone) - _MOST_NAMES} more" if len(gone) > _MOST_NAMES else ""
        yield _AREA.warning(
            "stale workers",
            f"{len(gone)} ended without a word: {', '.join(gone[:_MOST_NAMES])}{more}",
            "see their logs for why; others have taken their jobs over, and a running `inferq "
            "tasks` or any worker forgets them in time",
        )


def _mixed(alive: Sequence[WorkerInfo]) -> Iterator[Finding]:
    models = sorted({worker.model for worker in alive})
    if len(models) > 1:
        yield _AREA.failure(
            "models",
            f"workers of one queue serve different models: {', '.join(models)}",
            "a job is served by whichever comes first: give each model a queue of its own",
        )
    versions = sorted({worker.version for worker in alive})
    if alive and versions != [__version__]:
        yield _AREA.warning(
            "versions",
            f"workers run inferq {', '.join(versions)}, this is {__version__}",
            "fine during a rolling update; otherwise bring all to one release",
        )


def _oldest(overview: QueueOverview, alive: Sequence[WorkerInfo]) -> Finding:
    waits = [lane.oldest_ms for lane in overview.lanes.values() if lane.oldest_ms is not None]
    oldest = max(waits, default=None)
    if oldest is None:
        return _AREA.ok("oldest job", "nothing waits")
    message = f"has waited {oldest / 1000:.0f} s"
    if oldest < _LONG_WAIT_MS:
        return _AREA.ok("oldest job", message)
    free = sum(worker.free_blocks for worker in alive)
    return _AREA.warning(
        "oldest job",
        message,
        f"more workers, or fewer jobs: `inferq queue` shows the lanes, `inferq workers` the room "
        f"({free} KV blocks are free)",
    )


def _dead_letters(overview: QueueOverview) -> Finding:
    if not overview.dead_letters:
        return _AREA.ok("dead letters", "none")
    return _AREA.warning(
        "dead letters",
        f"{overview.dead_letters} jobs could not be served",
        "`inferq dead list` says why; `inferq dead redrive ID` tries again, `inferq dead drop ID` "
        "forgets",
    )
