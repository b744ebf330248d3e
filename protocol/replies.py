"""What the scripts are asked and what they answer, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from inferq.protocol.keys import Lane
from inferq.protocol.messages import FinishReason
from inferq.protocol.wire import number, text


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The answer to a submission; `created` is false when the job was there already."""

    job_id: str
    created: bool


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job handed to a worker, which holds it as long as its lease and in this epoch only.

    `cost` is in tokens, `published` the number of tokens in its stream, `attempts` counts this
    claim too. `queued_ms` is the wait before the first claim, `space` the KV tokens in whole blocks
    that the claim counted it as. A job that `runs_alone` may be what kills workers: nothing else
    shall run beside it.
    """

    job_id: str
    lane: Lane
    epoch: int
    payload: bytes
    cost: int
    published: int
    attempts: int
    crashes: int
    deadline_in_ms: int | None
    queued_ms: int
    space: int
    runs_alone: bool

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> ClaimedJob:
        """Build from the script's reply."""
        job_id, lane, epoch, payload, cost, offset, crashes, deadline_in, waited, space, alone = row
        return cls(
            job_id=job_id.decode(),
            lane=Lane(lane.decode()),
            epoch=epoch,
            payload=payload,
            cost=cost,
            published=offset,
            attempts=epoch,
            crashes=crashes,
            deadline_in_ms=None if deadline_in < 0 else deadline_in,
            queued_ms=waited,
            space=space,
            runs_alone=bool(alone),
        )


@dataclass(frozen=True, slots=True)
class ClaimReply:
    """What one claim brought.

    `lane_tails`: the stream id after which to wait for new entries of each lane, empty where one
    would change nothing now. `next_due_ms`: when the next delayed job or lease falls due.
    `waiting`: there is work that was not taken, as it did not fit or `max_jobs` was reached.
    """

    claimed: tuple[ClaimedJob, ...]
    lane_tails: Mapping[Lane, str]
    next_due_ms: int | None
    waiting: bool


@dataclass(frozen=True, slots=True)
class PublishItem:
    """Events of one job to append.

    `first`: tokens published before them. Each event comes with the tokens published after it. With
    `terminal`, how the job ended, the last event is the terminal one.
    """

    job_id: str
    epoch: int
    first: int
    events: tuple[tuple[int, bytes], ...]
    terminal: FinishReason | None = None

    def __post_init__(self) -> None:
        if self.terminal is not None and not self.events:
            raise ValueError("an end needs its terminal event")
        total = self.first
        for i, (after, _) in enumerate(self.events):
            is_end = self.terminal is not None and i == len(self.events) - 1
            if after < total or (after == total and not is_end):
                raise ValueError("every event but the terminal one must bring tokens")
            total = after


class PublishStatus(StrEnum):
    """What became of the events (or, for a heartbeat, of the lease) of one job."""

    OK = "ok"
    #: The job is not, or no longer, this worker's: drop it.
    STALE = "stale"
    #: The server has another number of tokens: resend from its offset.
    GAP = "gap"


@dataclass(frozen=True, slots=True)
class PublishReply:
    """The answer for one job; `offset` is the server's number of tokens.

    `cancel`: a producer asks to end it.
    """

    job_id: str
    status: PublishStatus
    offset: int
    cancel: bool

    @classmethod
    def from_row(cls, job_id: str, row: Sequence[Any]) -> PublishReply:
        """Build from the script's reply."""
        status, offset, cancel = row
        return cls(job_id, PublishStatus(status.decode()), offset, bool(cancel))


class CancelOutcome(StrEnum):
    """What became of a wish to cancel."""

    #: The job has ended as cancelled.
    CANCELLED = "cancelled"
    #: Its worker will end it within a step or so.
    REQUESTED = "requested"
    #: It had ended otherwise.
    FINISHED = "finished"
    UNKNOWN = "unknown"


class ExpireOutcome(StrEnum):
    """What became of a wish to end a job whose deadline may have passed."""

    #: The job has ended as expired.
    EXPIRED = "expired"
    #: A worker holds it and will end it.
    RUNNING = "running"
    #: It waits; its deadline is yet to come, or it has none.
    WAITING = "waiting"
    FINISHED = "finished"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ExpireReply:
    """The answer to `expire`, with the time left to the deadline, if there is one."""

    outcome: ExpireOutcome
    deadline_in_ms: int | None


class JobState(StrEnum):
    """Where a job is."""

    #: Waits for the time before which it must not start.
    DELAYED = "delayed"
    QUEUED = "queued"
    RUNNING = "running"
    #: Was running; waits for a worker to go on at its offset.
    RELEASED = "released"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as the server knows it; times are the server's, in ms since 1970.

    `note` is what the producer wrote down for itself when it submitted the job.
    """

    job_id: str
    state: JobState
    lane: Lane
    finish_reason: FinishReason | None
    published: int
    attempts: int
    handoffs: int
    crashes: int
    owner: str | None
    cancel_requested: bool
    created_ms: int
    deadline_ms: int | None
    finished_ms: int | None
    note: bytes | None = None

    #: The hash fields that a status is read from.
    FIELDS: ClassVar = (
        "state",
        "lane",
        "finish",
        "offset",
        "epoch",
        "handoffs",
        "crashes",
        "owner",
        "cancel",
        "created",
        "deadline",
        "finished",
        "note",
    )

    @classmethod
    def from_values(cls, job_id: str, values: Sequence[bytes | None]) -> JobStatus:
        """Build from the values of `FIELDS`."""
        *values, note = values
        texts = ("" if value is None else value.decode() for value in values)
        known = dict(zip(cls.FIELDS, texts, strict=False))
        return cls(
            job_id=job_id,
            state=JobState(known["state"]),
            lane=Lane(known["lane"]),
            finish_reason=FinishReason(known["finish"]) if known["finish"] else None,
            published=int(known["offset"]),
            attempts=int(known["epoch"]),
            handoffs=int(known["handoffs"]),
            crashes=int(known["crashes"]),
            owner=known["owner"] or None,
            cancel_requested=known["cancel"] == "1",
            created_ms=int(known["created"]),
            deadline_ms=int(known["deadline"]) or None,
            finished_ms=int(known["finished"]) if known["finished"] else None,
            note=note,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """How much work a queue holds.

    Jobs by state, and the tokens of all jobs that have not ended: of their prompts (upper bounds
    until a worker has counted them) and of their budgets (0 for a job without one).
    """

    queued: int = 0
    running: int = 0
    delayed: int = 0
    prompt_tokens: int = 0
    budget_tokens: int = 0


@dataclass(frozen=True, slots=True)
class QueueLength:
    """How long a queue is, its partitions together.

    `limit` is how many jobs may wait (queued or delayed) before a submission is refused, and
    `finished_total` counts the jobs that ever ended: two looks at it give a rate.
    """

    queued: int
    running: int
    delayed: int
    finished_total: int
    limit: int

    @property
    def waiting(self) -> int:
        """Jobs that count against the limit."""
        return self.queued + self.delayed

    def joined(self, other: QueueLength) -> QueueLength:
        """Return what this and another partition hold together."""
        return QueueLength(
            *(getattr(self, name) + getattr(other, name) for name in QueueLength.__slots__)
        )


class DeadLetterKind(StrEnum):
    """Why a job could not be served."""

    #: It never was a job, or not of a version that the workers speak.
    UNDECODABLE = "undecodable"
    #: The workers that ran it died; it may be redriven.
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job, or what passed for one, that could not be served.

    `payload` is whole for a crashed job and at most 64 KiB of an undecodable one; `job_id` is None
    where none could be read.
    """

    entry_id: str
    kind: DeadLetterKind
    job_id: str | None
    lane: Lane
    reason: str
    payload: bytes
    time_ms: int
    crashes: int
    prompt_tokens: int
    budget: int | None

    @property
    def can_be_redriven(self) -> bool:
        """Whether it is a job: one that crashed its workers, not bytes that nobody could read."""
        return self.kind is DeadLetterKind.CRASHED

    @classmethod
    def from_fields(cls, entry_id: str, fields: Mapping[bytes, bytes]) -> DeadLetter:
        """Build from an entry of the dead-letter stream; what it does not tell is unknown or 0."""
        budget = number(fields.get(b"budget"), -1)
        kind, lane = text(fields.get(b"kind")), text(fields.get(b"lane"))
        return cls(
            entry_id=entry_id,
            kind=DeadLetterKind(kind)
            if kind in set(DeadLetterKind)
            else DeadLetterKind.UNDECODABLE,
            job_id=text(fields.get(b"id")) or None,
            lane=Lane(lane) if lane in set(Lane) else Lane.NORMAL,
            reason=text(fields.get(b"reason")),
            payload=fields.get(b"payload", b""),
            time_ms=number(fields.get(b"time")),
            crashes=number(fields.get(b"crashes")),
            prompt_tokens=number(fields.get(b"prompt")),
            budget=None if budget < 0 else budget,
        )


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweep did."""

    workers_removed: int
    consumers_removed: int
    jobs_put_back: int
    entries_removed: int


@dataclass(frozen=True, slots=True)
class Registered:
    """The answer to a worker's heartbeat: the server's time, and what is asked of the worker.

    `drain`: to drain and end; `watched`: to write snapshots of its blocks; `contested`: the
    heartbeat before was another process's, under the same name.
    """

    now_ms: int
    drain: bool
    watched: bool
    contested: bool = False

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Registered:
        """Build from the script's reply."""
        now_ms, drain, watched, contested = row
        return cls(now_ms, bool(drain), bool(watched), bool(contested))


@dataclass(frozen=True, slots=True)
class LaneOverview:
    """One lane: entries that no worker took yet, and those delivered to one and not ended.

    Cancelled and expired jobs count as `waiting` until a claim comes to them. `oldest_ms` is how
    long the first of the waiting has waited; None where there is none.
    """

    waiting: int
    taken: int
    oldest_ms: int | None


@dataclass(frozen=True, slots=True)
class QueueOverview:
    """What a queue, or one partition of it, holds.

    `load` counts jobs and outstanding tokens, `left_behind` those of its queued jobs that a worker
    gave back or lost and nobody has taken over yet. `finished_total` counts the jobs that ever
    ended.
    """

    time_ms: int
    lanes: Mapping[Lane, LaneOverview]
    load: Load
    left_behind: int
    dead_letters: int
    finished_total: int = 0

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> QueueOverview:
        """Build from the script's reply."""
        now_ms, lanes, *counters, left_behind, dead_letters, finished_total = row
        return cls(
            time_ms=now_ms,
            lanes={
                lane: LaneOverview(waiting, taken, None if oldest < 0 else oldest)
                for lane, (waiting, taken, oldest) in zip(Lane, lanes, strict=True)
            },
            load=Load(*counters),
            left_behind=left_behind,
            dead_letters=dead_letters,
            finished_total=finished_total,
        )

    def joined(self, other: QueueOverview) -> QueueOverview:
        """Return what this and another partition hold together."""
        return QueueOverview(
            time_ms=max(self.time_ms, other.time_ms),
            lanes={lane: _joined(mine, other.lanes[lane]) for lane, mine in self.lanes.items()},
            load=Load(
                *(getattr(self.load, name) + getattr(other.load, name) for name in Load.__slots__)
            ),
            left_behind=self.left_behind + other.left_behind,
            dead_letters=self.dead_letters + other.dead_letters,
            finished_total=self.finished_total + other.finished_total,
        )


def _joined(mine: LaneOverview, other: LaneOverview) -> LaneOverview:
    waits = [wait for wait in (mine.oldest_ms, other.oldest_ms) if wait is not None]
    return LaneOverview(
        mine.waiting + other.waiting, mine.taken + other.taken, max(waits, default=None)
    )
