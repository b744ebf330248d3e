"""The duties around batches: run them, and remove what is too old."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any, Final

import structlog

from inferq.producer.async_client import AsyncClient
from inferq.producer.batches.answering import RETENTION_S
from inferq.producer.batches.expiry import remove_expired, remove_leftovers
from inferq.producer.batches.models import QueueClients
from inferq.producer.batches.storage import FileStorage
from inferq.producer.batches.store import BatchStore
from inferq.producer.batches.turns import BatchTurn, TurnPlan
from inferq.producer.batches.upkeep import UpkeepStore
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.errors import InferqError, ServerLost
from inferq.protocol.keys import TaskKeys
from inferq.protocol.task_ends import end_tasks

logger = structlog.get_logger("inferq.tasks")

#: The names that these tasks go by in RQ.
RUN_BATCHES: Final = "run_batches"
EXPIRE_BATCHES: Final = "expire_batches"

#: Seconds between two looks for what is too old.
EXPIRE_INTERVAL_S: Final = 600.0
#: Seconds that one turn lasts at most, and at least while other tasks wait for theirs.
LONGEST_TURN_S: Final = 60.0
SHORTEST_TURN_S: Final = 5.0
#: Seconds between two looks at whether the turn is over.
_LOOK_S: Final = 0.5


async def run_batches(
    settings: TasksSettings,
    queue: str,
    is_stopping: Callable[[], bool],
    on_kept: Callable[[int, int], None],
) -> None:
    """Run the batches of a queue that are due, until there are no more or others want a turn.

    `on_kept` is told of lines whose answers are kept: how many succeeded, and failed.
    """
    with closing(open_storage(settings)) as storage:
        await _run_turn(settings, queue, storage, is_stopping, on_kept)


async def _run_turn(
    settings: TasksSettings,
    queue: str,
    storage: FileStorage,
    is_stopping: Callable[[], bool],
    on_kept: Callable[[int, int], None],
) -> None:
    async with _clients(settings) as clients:
        home = clients.of(queue)
        await home.run(
            lambda redis: redis.delete(TaskKeys(queue).interval(RUN_BATCHES)),
            slot_key=TaskKeys.PREFIX,
        )
        turn = BatchTurn(
            TurnPlan(
                store=BatchStore(home),
                storage=storage,
                clients=clients,
                window=settings.batch_window,
                lease_s=settings.batch_lease_s,
                file_age_s=settings.batch_file_age_s,
                on_kept=on_kept,
            )
        )
        stop = asyncio.Event()
        watching = asyncio.create_task(_end_turn(home, settings.queues, stop, is_stopping))
        try:
            await turn.run(queue, stop)
        finally:
            await end_tasks([watching])


async def expire_batches(
    settings: TasksSettings, queue: str, is_stopping: Callable[[], bool]
) -> None:
    """Remove files and batches whose time is over, and what crashes left in the storage.

    Those of all queues: `queue` is any of this process's. Raises `ForeignStorage` for a storage
    that is another server's.
    """
    with closing(open_storage(settings)) as storage:
        async with _clients(settings) as clients:
            store = UpkeepStore(clients.of(queue))
            removed = await remove_expired(store, storage, is_stopping)
            leftovers = await remove_leftovers(store, storage)
    logger.debug("batches expired", removed=removed, leftovers=leftovers)


def open_storage(settings: TasksSettings) -> FileStorage:
    """Return the storage of the settings; raise `InferqError` if there is none."""
    if settings.batch_storage is None:
        raise InferqError("there are batches, and no INFERQ_BATCH_STORAGE")
    return FileStorage(settings.batch_storage, endpoint_url=settings.batch_storage_endpoint)


@asynccontextmanager
async def _clients(settings: TasksSettings) -> AsyncIterator[QueueClients]:
    clients = QueueClients(
        lambda queue: AsyncClient(
            settings.redis_url.get_secret_value(),
            queue,
            partitions=settings.partitions,
            queue_limit=settings.queue_limit,
            retention_s=RETENTION_S,
        )
    )
    try:
        yield clients
    finally:
        await clients.aclose()


async def _end_turn(
    client: AsyncClient,
    queues: Sequence[str],
    stop: asyncio.Event,
    is_stopping: Callable[[], bool],
) -> None:
    """Set `stop` when the process is to end, the turn has lasted, or others wait for theirs."""
    began = time.monotonic()
    while not is_stopping():
        lasted_s = time.monotonic() - began
        if lasted_s > LONGEST_TURN_S:
            break
        if lasted_s > SHORTEST_TURN_S and await _others_wait(client, queues):
            break
        await asyncio.sleep(_LOOK_S)
    stop.set()


async def _others_wait(client: AsyncClient, queues: Sequence[str]) -> bool:
    """Whether tasks of any queue that this process serves wait for it."""

    async def count(redis: Any) -> int:
        async with redis.pipeline(transaction=False) as pipeline:
            for queue in queues:
                pipeline.llen(TaskKeys(queue).waiting)
            return sum(await pipeline.execute())

    try:
        return bool(await client.run(count, slot_key=TaskKeys.PREFIX))
    except ServerLost:
        return False
