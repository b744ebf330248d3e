"""A batch from one local file to another, without a gateway; what was answered survives a kill."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from inferq.producer.async_client import AsyncClient
from inferq.producer.batches.answering import AnsweringPlan, LineAnswerer
from inferq.producer.batches.lines import LineChecks
from inferq.producer.batches.local_output import check_free, check_paths, make_files
from inferq.producer.batches.local_state import LocalBatch, LocalState, read_input
from inferq.producer.batches.models import QueueClients, find_queue
from inferq.producer.batches.records import Counts, Terms
from inferq.producer.batches.running import BatchRunner, RunPlan
from inferq.producer.batches.storage import FileStorage
from inferq.protocol.errors import InferqError, InvalidRequestError
from inferq.protocol.task_ends import end_tasks

logger = structlog.get_logger("inferq.batches")

#: Seconds between two signs of progress, and between two looks for a worker of the model.
PROGRESS_S: Final = 0.2
LOOK_S: Final = 2.0
#: Seconds after which lines that have ended are written, however few.
PART_S: Final = 5.0

_PARTS: Final = "parts"


@dataclass(frozen=True, slots=True)
class LocalResult:
    """How it went; `resumed` lines were answered by earlier runs.

    Where it is not complete, the same call goes on; jobs under way go on meanwhile.
    """

    counts: Counts
    is_complete: bool
    resumed: int


async def run_local_batch(
    batch: LocalBatch,
    clients: QueueClients,
    *,
    stop: asyncio.Event,
    on_progress: Callable[[Counts], None],
) -> LocalResult:
    """Run a batch, or go on with it, until its files are there or `stop` is set.

    Clients should keep results for `RETENTION_S`. A server or worker that is away is waited for.
    Raises `SurveyFailed` for an input that is no batch, `InvalidRequestError` (field `input`,
    `output` or `errors`) where files are not as they must be, `StorageError` where they cannot be
    written, and `ServerLost` if the server is away at first.
    """
    check_paths(batch)
    with _locked(batch):
        state = LocalState.load(batch)
        is_new = state is None
        if state is not None:
            await state.check(batch)
        await asyncio.to_thread(check_free, batch, state)
        if state is None:
            state = await LocalState.begin(batch)
        resumed = state.checkpoint.counts.ended
        on_progress(state.checkpoint.counts)
        try:
            client = await _find(clients, state.survey.model, batch.terms, stop)
        except InferqError:
            if is_new:  # nothing was asked: another input may be the next
                state.forget()
            raise
        if client is None:
            return LocalResult(state.checkpoint.counts, False, resumed)
        with contextlib.closing(FileStorage(str(batch.folder))) as storage:
            counts, is_complete = await _run(batch, state, client, storage, stop, on_progress)
        on_progress(counts)
        if is_complete:
            await asyncio.to_thread(make_files, batch, state)
            state.forget()
        return LocalResult(counts, is_complete, resumed)


async def _run(
    batch: LocalBatch,
    state: LocalState,
    client: AsyncClient,
    storage: FileStorage,
    stop: asyncio.Event,
    on_progress: Callable[[Counts], None],
) -> tuple[Counts, bool]:
    found = state.survey
    answerer = LineAnswerer(
        AnsweringPlan(client=client, batch_id=state.batch_id, lane=batch.terms.lane, owner=None)
    )
    plan = RunPlan(
        batch_id=state.batch_id,
        client=client,
        source=lambda offset: read_input(batch.input, offset),
        checks=LineChecks(
            endpoint=found.endpoint or "",
            model=found.model,
            terms=batch.terms,
            repeated=found.repeated,
        ),
        answerer=answerer,
        storage=storage,
        folder=_PARTS,
        journal=state,
        window=batch.window,
        part_s=PART_S,
    )
    runner = BatchRunner(plan, state.checkpoint)

    async def tell() -> None:
        while True:
            on_progress(runner.counts)
            await asyncio.sleep(PROGRESS_S)

    telling = asyncio.create_task(tell())
    try:
        is_complete = await runner.run(stop)
        return runner.counts, is_complete
    finally:
        await end_tasks([telling])


async def _find(
    clients: QueueClients, model: str | None, terms: Terms, stop: asyncio.Event
) -> AsyncClient | None:
    """Wait for a queue that serves the model; None if `stop` comes first."""
    await clients.of(terms.queues[0]).ping()
    while not stop.is_set():
        found = await find_queue(clients, model, terms)
        if found.client is not None:
            return found.client
        logger.warning("no worker serves the model", model=model)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)
    return None


@contextmanager
def _locked(batch: LocalBatch) -> Iterator[None]:
    """Keep other runs for the same output away; leave no empty folder behind."""
    folder = batch.folder
    try:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise InvalidRequestError(f"{folder}: {error.strerror}", field="output") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidRequestError(
                f"another run is writing {batch.output}", field="output"
            ) from None
        try:
            yield
        finally:
            if not batch.state_path.exists():
                _remove(folder)
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:  # nobody needs it: it is in the way of no later run
        logger.warning("folder not removed", folder=str(folder), error=str(error))
