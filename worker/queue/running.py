"""The jobs a worker holds: what each generated, what the server has of it, what it reserves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from inferq.protocol.keys import Lane
from inferq.protocol.messages import Event, FinishReason, Terminal, TokenLogprob

#: Most tokens of one event: keeps events far below the protocol's size limit, logprobs included.
MAX_EVENT_TOKENS: Final = 2048


@dataclass(slots=True)
class OutputLog:
    """All tokens of one output since offset 0, each with its share of text and its logprobs.

    Kept whole until the job ends: a server that lost its tail is sent the rest again.
    """

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    #: Text released at the end, after the last token's share.
    tail: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def append(self, token_id: int, text: str, logprob: TokenLogprob | None) -> None:
        """Add one token."""
        self.token_ids.append(token_id)
        self.texts.append(text)
        self.logprobs.append(logprob)

    def event(self, start: int, stop: int, terminal: Terminal | None) -> Event:
        """Return the event of tokens `start` to `stop`, and the end if `terminal` is given."""
        ends: list[int] = []
        length = 0
        for text in self.texts[start:stop]:
            length += len(text)
            ends.append(length)
        logprobs = [lp for lp in self.logprobs[start:stop] if lp is not None]
        ended = terminal is not None
        return Event(
            offset=start,
            token_ids=tuple(self.token_ids[start:stop]),
            text="".join(self.texts[start:stop]) + (self.tail if ended else ""),
            text_ends=tuple(ends),
            logprobs=tuple(logprobs) if logprobs else None,
            finish_reason=self.finish_reason if ended else None,
            stop_reason=self.stop_reason if ended else None,
            terminal=terminal,
        )


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
    log: OutputLog = field(default_factory=OutputLog)
    #: Tokens the server has acknowledged.
    acknowledged: int = 0
    #: Tokens that were published before this worker's claim.
    inherited: int = 0
    terminal: Terminal | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the job's end is decided (though perhaps not yet published)."""
        return self.terminal is not None

    @property
    def has_started(self) -> bool:
        """Whether this worker has generated a token for it."""
        return len(self.log.token_ids) > self.inherited

    @property
    def is_dirty(self) -> bool:
        """Whether there is something that the server does not have."""
        return self.is_finished or self.acknowledged < len(self.log.token_ids)

    def unsent_events(self) -> tuple[tuple[int, bytes], ...]:
        """Return the events after the acknowledged offset, each with its total of tokens."""
        total = len(self.log.token_ids)
        events: list[tuple[int, bytes]] = []
        start = self.acknowledged
        while start < total or (self.is_finished and not events):
            stop = min(total, start + MAX_EVENT_TOKENS)
            event = self.log.event(start, stop, self.terminal if stop == total else None)
            events.append((stop, event.encode()))
            start = stop
        return tuple(events)


class RunningJobs:
    """The registry of claimed jobs, and the KV tokens they reserve out of the pool's."""

    def __init__(self, capacity_tokens: int, block_size: int, max_jobs: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.block_size = block_size
        self.max_jobs = max_jobs
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
        """Jobs that may be claimed before `max_jobs` is reached."""
        return self.max_jobs - len(self._jobs)

    def get(self, job_id: str) -> RunningJob | None:
        """Return the job of this id, if this worker holds it."""
        return self._jobs.get(job_id)

    def add(self, job: RunningJob) -> None:
        """Take a job in, with its reservation."""
        self._jobs[job.id] = job
        self._reserved += job.reserved

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

    def round_up(self, tokens: int) -> int:
        """Return `tokens` rounded up to whole blocks."""
        return -(-tokens // self.block_size) * self.block_size
