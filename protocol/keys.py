"""Every Redis key name of the protocol, and the form of job ids. See docs/protocol.md."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Final

from inferq.protocol.errors import InvalidRequestError

#: The consumer group of every lane stream.
GROUP: Final = "workers"
MAX_PARTITIONS: Final = 1024
DEFAULT_QUEUE: Final = "default"

_QUEUE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_JOB_ID = re.compile(r"[0-9a-f]{32}-(\d{1,4})")


class Lane(StrEnum):
    """Priority lanes of a queue, most urgent first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


#: Share of claims that a lane gets while all have work: none ever starves.
LANE_WEIGHTS: Final[Mapping[Lane, int]] = MappingProxyType(
    {Lane.HIGH: 16, Lane.NORMAL: 4, Lane.LOW: 1}
)


@dataclass(frozen=True, slots=True)
class QueueKeys:
    """The keys of one partition of one queue; all share a hash tag, so scripts are atomic."""

    queue: str
    partition: int = 0

    def __post_init__(self) -> None:
        if not _QUEUE_NAME.fullmatch(self.queue):
            raise InvalidRequestError(
                "must be 1 to 100 letters, digits, '.', '_' or '-', the first a letter or digit",
                field="queue",
                limit=100,
            )
        if not 0 <= self.partition < MAX_PARTITIONS:
            raise InvalidRequestError(
                f"partition {self.partition} is not in [0, {MAX_PARTITIONS})",
                field="partition",
                limit=MAX_PARTITIONS,
            )

    @property
    def prefix(self) -> str:
        """What every key starts with."""
        return f"inferq:{{{self.queue}.{self.partition}}}:"

    def jobs(self, lane: Lane) -> str:
        """Stream: queued and running jobs of a lane; fields id, cost, job."""
        return f"{self.prefix}jobs:{lane.value}"

    def job(self, job_id: str) -> str:
        """Hash: the state of one job."""
        return f"{self.prefix}job:{job_id}"

    def out(self, job_id: str) -> str:
        """Stream: the events of one job, ids `<tokens so far>-<0, or 1 when terminal>`."""
        return f"{self.prefix}out:{job_id}"

    def idem(self, key: str) -> str:
        """String: the job id and payload digest behind an idempotency key."""
        return f"{self.prefix}idem:{key}"

    @property
    def delayed(self) -> str:
        """Sorted set: job ids by the server time (ms) at which they may start."""
        return f"{self.prefix}delayed"

    @property
    def leases(self) -> str:
        """Sorted set: running job ids by the server time (ms) at which their lease ends."""
        return f"{self.prefix}leases"

    @property
    def dead(self) -> str:
        """Stream: dead letters."""
        return f"{self.prefix}dead"

    @property
    def load(self) -> str:
        """Hash: counters kept by the scripts, and the lanes' virtual clocks."""
        return f"{self.prefix}load"

    @property
    def workers(self) -> str:
        """Hash: worker name to its last heartbeat."""
        return f"{self.prefix}workers"

    @property
    def outbox(self) -> str:
        """Stream: ends of jobs of which a webhook is to tell; fields id, finish, time, hook."""
        return f"{self.prefix}outbox"

    def drain(self, worker: str) -> str:
        """String: somebody asks this worker to drain; expires."""
        return f"{self.prefix}drain:{worker}"

    @property
    def watch(self) -> str:
        """String: somebody looks at the workers' blocks; expires."""
        return f"{self.prefix}watch"

    def blocks(self, worker: str) -> str:
        """String: a worker's blocks at one moment, written while somebody looks; expires."""
        return f"{self.prefix}blocks:{worker}"

    def wake(self, reader: str) -> str:
        """Stream: one entry, which wakes a reader that blocks on it; written by its own client."""
        return f"{self.prefix}wake:{reader}"


@dataclass(frozen=True, slots=True)
class GatewayKeys:
    """The keys in which gateways count what one API key uses, by the key's name."""

    name: str

    #: What every key starts with; one hash tag, so that scripts are atomic.
    PREFIX: ClassVar[str] = "inferq:{gateway}:"

    @property
    def budget(self) -> str:
        """Hash: requests and tokens left, and when that was so."""
        return f"{self.PREFIX}budget:{self.name}"

    @property
    def slots(self) -> str:
        """Sorted set: requests in progress by the server time (ms) at which their lease ends."""
        return f"{self.PREFIX}slots:{self.name}"


@dataclass(frozen=True, slots=True)
class TaskKeys:
    """The keys in which tasks processes keep what they do for one queue."""

    queue: str

    #: What every key starts with; one hash tag for all queues, as they share one server of RQ's.
    PREFIX: ClassVar[str] = "inferq:{tasks}:"
    #: What every key of RQ's own starts with.
    RQ_PREFIX: ClassVar[str] = f"{PREFIX}rq"

    def __post_init__(self) -> None:
        QueueKeys(self.queue)

    @property
    def due(self) -> str:
        """Sorted set: deliveries that have not ended by the server time (ms) of the next try."""
        return f"{self.PREFIX}due:{self.queue}"

    @property
    def dead(self) -> str:
        """Sorted set: deliveries that were given up by the server time (ms) when they were."""
        return f"{self.PREFIX}dead:{self.queue}"

    @property
    def log(self) -> str:
        """Stream: what became of each try."""
        return f"{self.PREFIX}log:{self.queue}"

    @property
    def deliveries(self) -> str:
        """What the key of each delivery starts with, before its id."""
        return f"{self.PREFIX}delivery:{self.queue}:"

    def delivery(self, delivery_id: str) -> str:
        """Hash: one delivery."""
        return f"{self.deliveries}{delivery_id}"

    def host(self, host: str) -> str:
        """String: the server time (ms) from which a receiver's host may be called again."""
        return f"{self.PREFIX}host:{self.queue}:{host}"

    @property
    def waiting(self) -> str:
        """List: tasks that wait for a worker of RQ's; it is RQ's own."""
        return f"{self.RQ_PREFIX}:queue:{self.queue}"

    def interval(self, duty: str) -> str:
        """String: there while a duty has been done for this interval."""
        return f"{self.PREFIX}interval:{self.queue}:{duty}"

    @classmethod
    def shared_interval(cls, duty: str) -> str:
        """Return the same for a duty that is for all queues at once."""
        return f"{cls.PREFIX}interval::{duty}"


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """The keys of files and batches; all share a hash tag, so scripts are atomic."""

    #: What every key starts with.
    PREFIX: ClassVar[str] = "inferq:{batches}:"
    #: What the keys of each file and of each batch start with, before its id.
    FILES: ClassVar[str] = f"{PREFIX}file:"
    BATCHES: ClassVar[str] = f"{PREFIX}batch:"

    def file(self, file_id: str) -> str:
        """Hash: one file."""
        return f"{self.FILES}{file_id}"

    def files(self, owner: str | None) -> str:
        """Sorted set: an API key's files by the server time (ms) at which they were made."""
        return f"{self.PREFIX}files:{owner or ''}"

    def batch(self, batch_id: str) -> str:
        """Hash: one batch."""
        return f"{self.BATCHES}{batch_id}"

    def parts(self, batch_id: str) -> str:
        """List: the parts of a batch's output that are whole."""
        return f"{self.PREFIX}parts:{batch_id}"

    def batches(self, owner: str | None) -> str:
        """Sorted set: an API key's batches by the server time (ms) at which they were made."""
        return f"{self.PREFIX}batches:{owner or ''}"

    def due(self, queue: str) -> str:
        """Sorted set: batches that have not ended by the server time (ms) when one may take them.

        `queue` is the first of the gateway's that made them.
        """
        return f"{self.PREFIX}due:{QueueKeys(queue).queue}"

    @property
    def server(self) -> str:
        """String: the server's identity, which the storage of its files has too."""
        return f"{self.PREFIX}server"

    @property
    def expiring(self) -> str:
        """Sorted set: files, and batches that have ended, by the server time (ms) of their end."""
        return f"{self.PREFIX}expiring"


def new_job_id(partition: int = 0) -> str:
    """Make a job id: 48 bits of milliseconds, 80 random bits (as in UUIDv7), the partition."""
    milliseconds = time.time_ns() // 1_000_000
    return f"{milliseconds & (2**48 - 1):012x}{secrets.randbits(80):020x}-{partition}"


def partition_of(job_id: str) -> int:
    """Return the partition that a job id carries; raise `InvalidRequestError` if it is none."""
    match = _JOB_ID.fullmatch(job_id) if isinstance(job_id, str) else None
    if match is None or int(match[1]) >= MAX_PARTITIONS:
        raise InvalidRequestError(f"{job_id!r} is not a job id", field="job_id")
    return int(match[1])
