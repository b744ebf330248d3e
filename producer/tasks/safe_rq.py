"""RQ that can do no more than it is told: JSON only, our key prefix, and tasks known by name.

Whoever can write to Redis can put anything into RQ's queue. RQ itself would import and call what a
job names, unpickle its arguments, run its callbacks and call its web hooks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType
from typing import Any, ClassVar, Final

import structlog
from redis import Redis

from inferq.protocol.errors import InferqError
from inferq.protocol.keys import TaskKeys

# RQ reads it once, when it is imported, and nothing else of ours imports it.
os.environ["RQ_KEY_PREFIX"] = TaskKeys.RQ_PREFIX

import rq.defaults
from rq import Queue, SimpleWorker
from rq.exceptions import DeserializationError, NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

logger = structlog.get_logger("inferq.tasks")

#: A task by the name that jobs call it by.
Tasks = Mapping[str, Callable[..., Any]]

#: Seconds after which a task that nobody performed is forgotten: another look gives it out anew.
UNSTARTED_TTL_S: Final = 600
#: Seconds that a task may take; tasks bound themselves well below it.
TIMEOUT_S: Final = 900
#: Seconds that failed and refused tasks are kept, to be looked at: some may fail at every look.
FAILURE_TTL_S: Final = 3600

#: What a job may have in RQ, and ours never do: code to call, addresses to call, lives after death.
_REFUSED_FIELDS: Final = frozenset(
    {
        *(b"success_callback_name", b"failure_callback_name", b"stopped_callback_name"),
        *(b"webhooks", b"dependency_ids", b"dependency_id"),
        *(b"retries_left", b"retry_intervals", b"repeats_left", b"repeat_intervals"),
        *(b"rate_limit_key", b"rate_limit_concurrency"),
    }
)
#: What stands for a job that cannot even be read.
_UNREADABLE: Final = b'["", null, [], {}]'


class TaskRefused(InferqError):
    """A job in RQ's queue that is no task of ours; nothing of it was performed."""


class SafeJob(Job):
    """A job that performs one of `tasks`, or is refused."""

    tasks: ClassVar[Tasks] = MappingProxyType({})
    #: Why it is refused before its name is looked at.
    refusal: str | None = None

    @property
    def func(self) -> Callable[..., Any]:
        """The task of that name; raise `TaskRefused` if there is none."""
        name = self.func_name
        if self.refusal is not None:
            raise TaskRefused(self.refusal)
        if self.instance is not None or not isinstance(name, str) or name not in self.tasks:
            raise TaskRefused(f"{name!r} is not one of {', '.join(sorted(self.tasks))}")
        return self.tasks[name]

    def restore(self, raw_data: Mapping[bytes, bytes]) -> None:
        """Read what Redis holds; of what is refused, nothing stays that RQ would act on."""
        refused = sorted(name.decode() for name in _REFUSED_FIELDS if raw_data.get(name))
        kept = {name: value for name, value in raw_data.items() if name not in _REFUSED_FIELDS}
        try:
            super().restore(kept)
        except NoSuchJobError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a bad field makes RQ raise
            super().restore({b"data": _UNREADABLE, b"origin": raw_data.get(b"origin", b"")})
            self.refusal = f"cannot be read: {type(error).__name__}: {error}"
        self.failure_ttl = FAILURE_TTL_S
        if refused:
            self.refusal = f"has {', '.join(refused)}"


class SafeQueue(Queue):
    """A queue of tasks."""

    job_class = SafeJob

    def give(self, task: str, *arguments: str) -> None:
        """Have a task performed, by whichever worker is free first."""
        self.enqueue_call(
            task,
            args=arguments,
            timeout=TIMEOUT_S,
            ttl=UNSTARTED_TTL_S,
            result_ttl=0,
        )


class SafeWorker(SimpleWorker):
    """Performs tasks one after the other, in this process, in its main thread.

    RQ's commands by publish and subscribe (stop a job, shut down) are not listened to.
    """

    queue_class = SafeQueue
    #: Told when the process is to end, so that a task that lasts comes to its end.
    on_stop: Callable[[], None] | None = None
    #: Told of a job that was refused.
    on_refused: Callable[[], None] | None = None

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """Let the task under way come to its end, and perform no more."""
        if self.on_stop is not None:
            self.on_stop()
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def subscribe(self) -> None:
        """Listen to nobody."""

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        """Say loudly what was refused or failed; RQ keeps it among the failed jobs."""
        error = exc_info[1]
        if isinstance(error, (TaskRefused, DeserializationError)):
            why = str(error) or "its payload is not JSON"
            if self.on_refused is not None:
                self.on_refused()
            logger.error("task refused", rq_job=job.id, rq_queue=job.origin, reason=why)
        else:
            logger.error("task failed", rq_job=job.id, task=job.func_name, fault=error)


def check_prefix() -> None:
    """Raise `InferqError` if somebody imported RQ before its keys had our prefix."""
    if rq.defaults.RQ_KEY_PREFIX != TaskKeys.RQ_PREFIX:
        raise InferqError(
            f"RQ was imported with the key prefix {rq.defaults.RQ_KEY_PREFIX!r}: "
            "import inferq.producer.tasks.safe_rq before rq"
        )


def task_queue(connection: Redis, queue: str) -> SafeQueue:
    """Return RQ's queue of the tasks around one of our queues, to give tasks to."""
    check_prefix()
    return SafeQueue(queue, connection=connection, job_class=SafeJob, serializer=JSONSerializer)


def task_worker(
    connection: Redis,
    queues: tuple[str, ...],
    tasks: Tasks,
    *,
    on_stop: Callable[[], None] | None = None,
    on_refused: Callable[[], None] | None = None,
) -> SafeWorker:
    """Return a worker that performs `tasks` from the task queues of `queues`, and nothing else.

    `on_stop` is called by the signal handler that asks it to end, `on_refused` for each job that is
    none of them.
    """
    check_prefix()
    job_class = type("PerformedJob", (SafeJob,), {"tasks": MappingProxyType(dict(tasks))})
    worker = SafeWorker(
        [
            SafeQueue(name, connection=connection, job_class=job_class, serializer=JSONSerializer)
            for name in queues
        ],
        connection=connection,
        job_class=job_class,
        queue_class=SafeQueue,
        serializer=JSONSerializer,
        log_job_description=False,
    )
    worker.on_stop = on_stop
    worker.on_refused = on_refused
    return worker
