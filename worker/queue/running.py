"""The jobs a worker holds: what each generated, what the server has of it, what it reserves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from inferq.protocol.keys import Lane
from inferq.protocol.messages import Terminal
from inferq.protocol.output_log import JobLog
from inferq.protocol.replies import PublishItem

#: Most jobs at once that take no room in the engine, besides those that do.
MAX_ERRANDS: Final = 8
#: Why a job is lost whose lease the server no longer has for us.
NOT_OURS: Final = "the server has it for another worker now, or not at all"


@dataclass(slots=True, eq=False)
class RunningJob:
    """One claimed job. Times are `time.monotonic()` seconds, `reserved` is in KV tokens."""

    id: str
    epoch: int
    lane: Lane
    attempts: int
    queued_ms: int
    reserved: int
    claimed_at: float
    lease_until: float
    deadline: float | None = None
    #: What is to be published; empty before the end of a job that publishes at its end only.
    log: JobLog = field(default_factory=JobLog)
    #: Tokens the server has acknowledged.
    acknowledged: int = 0
    #: Tokens that were published before this worker's claim.
    inherited: int = 0
    #: Whether nothing else may run beside it.
    runs_alone: bool = False
    #: Whether it takes no room in the engine, as far as is known.
    is_errand: bool = False
    #: Whether this worker has generated a token for it.
    has_started: bool = False
    #: When the first of what no publish took yet was there.
    unsent_since: float | None = None
    terminal: Terminal | None = None
    #: The trace that it is in, if any, in 32 hexadecimal digits.
    trace_id: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """What log lines about the job name it by."""
        trace = {} if self.trace_id is None else {"trace_id": self.trace_id}
        return {"job_id": self.id, **trace}

    @property
    def is_finished(self) -> bool:
        """Whether the job's end is decided (though perhaps not yet published)."""
        return self.terminal is not None

    @property
    def is_dirty(self) -> bool:
        """Whether there is something that the server does not have."""
        return self.is_finished or self.acknowledged < self.log.total

    def unsent(self, max_bytes: int) -> PublishItem:
        """Return what the server does not have, the end with the last of it.

        The event that brings it to `max_bytes` is the last.
        """
        events: list[tuple[int, bytes]] = []
        size, is_end = 0, False
        for total, event in self.log.iter_events(self.acknowledged, self.terminal):
            data = event.encode()
            events.append((total, data))
            size += len(data)
            is_end = event.terminal is not None
            if size >= max_bytes:
                break
        return PublishItem(
            job_id=self.id,
            epoch=self.epoch,
            first=self.acknowledged,
            events=tuple(events),
            terminal=self.terminal.finish_reason if self.terminal and is_end else None,
        )

    def has_more_than(self, item: PublishItem) -> bool:
        """Whether something is left when the server has `item`, which is not empty."""
        total, _ = item.events[-1]
        return total < self.log.total or (self.is_finished and item.terminal is None)


class RunningJobs:
    """The registry of claimed jobs, and the KV tokens they reserve out of the pool's."""

    def __init__(self, capacity_tokens: int, block_size: int, max_jobs: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.block_size = block_size
        self.max_jobs = max_jobs
        #: Set when a job is taken in; whoever keeps the jobs' times clears it.
        self.added = asyncio.Event()
        self._jobs: dict[str, RunningJob] = {}
        self._reserved = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[RunningJob]:
        return iter(list(self._jobs.values()))

    def __contains__(self, job: RunningJob) -> bool:
        return self._jobs.get(job.id) is job

    @property
    def free_tokens(self) -> int:
        """KV tokens that no claimed job has a right to; negative while one outgrew its bound."""
        return self.capacity_tokens - self._reserved

    @property
    def free_places(self) -> int:
        """Jobs that may be claimed before `max_jobs` is reached; 0 while one runs alone."""
        if any(job.runs_alone for job in self._jobs.values()):
            return 0
        return max(0, self.max_jobs - len(self._jobs) + self._num_errands)

    @property
    def free_errands(self) -> int:
        """Jobs that take no room in the engine which may be claimed; 0 while one runs alone."""
        if any(job.runs_alone for job in self._jobs.values()):
            return 0
        return max(0, MAX_ERRANDS - self._num_errands)

    @property
    def _num_errands(self) -> int:
        return sum(job.is_errand for job in self._jobs.values())

    def get(self, job_id: str) -> RunningJob | None:
        """Return the job of this id, if this worker holds it."""
        return self._jobs.get(job_id)

    def add(self, job: RunningJob) -> None:
        """Take a job in, with its reservation."""
        self._jobs[job.id] = job
        self._reserved += job.reserved
        self.added.set()

    def remove(self, job: RunningJob) -> None:
        """Let a job go, with its reservation; nothing happens if it is gone already."""
        if job in self:
            del self._jobs[job.id]
            self._reserved -= job.reserved

    def reserve(self, job: RunningJob, tokens: int) -> None:
        """Change a job's reservation to `tokens`, rounded up to whole blocks."""
        rounded = self.round_up(tokens)
        self._reserved += rounded - job.reserved
        job.reserved = rounded

    def tokens_for(self, prompt_tokens: int, budget: int, num_outputs: int) -> int:
        """Return the most KV tokens, in whole blocks, that a request can come to hold.

        The prompt's full blocks are there once, whatever the number of outputs; each output has
        its own after them, with a copy of the prompt's rest.
        """
        shared = prompt_tokens // self.block_size * self.block_size
        return shared + num_outputs * (self.round_up(prompt_tokens + budget) - shared)

    def round_up(self, tokens: int) -> int:
        """Return `tokens` rounded up to whole blocks."""
        return -(-tokens // self.block_size) * self.block_size
