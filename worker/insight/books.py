"""All books of a worker but the engine's; kept by the I/O side, for `metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field

from inferq.worker.jobs.books import JobBooks
from inferq.worker.queue.books import PublishBooks


@dataclass(frozen=True, slots=True)
class WorkerBooks:
    """All books of a worker but the engine's."""

    jobs: JobBooks = field(default_factory=JobBooks)
    publishing: PublishBooks = field(default_factory=PublishBooks)
