"""The batches of one queue, as a tasks process runs them in its turn."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from inferq.producer.async_client import AsyncClient
from inferq.producer.batches.answering import AnsweringPlan, LineAnswerer
from inferq.producer.batches.journals import Checkpoint, Part, RedisJournal, names_of
from inferq.producer.batches.lines import LineChecks
from inferq.producer.batches.models import QueueClients, find_queue
from inferq.producer.batches.parts import join_parts
from inferq.producer.batches.records import (
    OUTPUT_PURPOSE,
    Counts,
    FileFault,
    FileRecord,
    Status,
    encode_counts,
)
from inferq.producer.batches.running import BatchRunner, RunPlan
from inferq.producer.batches.storage import FileStorage, StorageError, StoredFileGone
from inferq.producer.batches.store import BatchLost, BatchStore, Resumption, TakenBatch
from inferq.producer.batches.surveys import SurveyFailed, decode_repeated, survey
from inferq.protocol.errors import InferqError, QueueFull, ServerLost
from inferq.protocol.task_ends import end_tasks

logger = structlog.get_logger("inferq.batches")

#: Batches that one process runs at once.
AT_ONCE: Final = 4
#: Seconds between two looks for more, and between two signs of life.
LOOK_S: Final = 1.0
RENEW_S: Final = 2.0
#: Milliseconds until a batch is tried again that could not go on.
AGAIN_MS: Final = 10_000
#: Seconds after its making during which a batch waits although living workers serve other models.
PATIENCE_S: Final = 300
#: Seconds after its window from which a batch that cannot end in order fails.
GIVE_UP_S: Final = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """What turns have in common."""

    store: BatchStore
    storage: FileStorage
    clients: QueueClients
    window: int
    lease_s: float
    file_age_s: int
    #: Told of lines whose answers are kept: how many succeeded, and failed.
    on_kept: Callable[[int, int], None] | None = None

    @property
    def lease_ms(self) -> int:
        """The lease in milliseconds."""
        return int(self.lease_s * 1000)


class BatchTurn:
    """Runs batches that nobody runs, some at once."""

    def __init__(self, plan: TurnPlan) -> None:
        self._plan = plan

    async def run(self, queue: str, stop: asyncio.Event) -> None:
        """Run what is due until there is no more, or until `stop`: then each goes on later.

        Sets `stop` where a fault ends the turn, and raises it once all have let go in order.
        """
        running: set[asyncio.Task[None]] = set()
        try:
            while not stop.is_set():
                for taken in await self._take(queue, AT_ONCE - len(running)):
                    running.add(asyncio.create_task(_BatchRun(self._plan, taken).run(stop)))
                if not running:
                    return
                done, running = await asyncio.wait(
                    running, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
            if running:
                await asyncio.gather(*running)
        except Exception:
            stop.set()
            if running:
                await asyncio.wait(running)
            raise
        finally:
            await end_tasks(running)

    async def _take(self, queue: str, most: int) -> list[TakenBatch]:
        if most == 0:
            return []
        try:
            return await self._plan.store.take(queue, most=most, lease_ms=self._plan.lease_ms)
        except (ServerLost, QueueFull) as error:  # those that run already know how to wait
            logger.warning("no batch taken", queue=queue, reason=str(error))
            return []


class _BatchRun:
    """One batch, for as long as it is ours."""

    def __init__(self, plan: TurnPlan, taken: TakenBatch) -> None:
        self._plan = plan
        self._record = taken.record
        self._taken = taken
        self._journal = RedisJournal(plan.store, taken, plan.lease_ms)
        self._runner: BatchRunner | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Bring the batch as far as it goes until `stop`; whatever fails is tried again later."""
        keeping = asyncio.create_task(self._keep())
        working = asyncio.create_task(self._work(stop))
        try:
            await asyncio.wait((keeping, working), return_when=asyncio.FIRST_COMPLETED)
            first = working if working.done() else keeping
            await end_tasks([keeping, working])
            first.result()
        except BatchLost as error:
            logger.info("batch left", batch=self._record.id, reason=str(error))
        except SurveyFailed as error:
            await self._tolerantly(self._fail(error.fault))
        except (StorageError, ServerLost, QueueFull) as error:
            logger.warning("batch waits", batch=self._record.id, reason=str(error))
            await self._tolerantly(self._later(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the batch waits for another try
            logger.error("batch failed, and is tried again", batch=self._record.id, fault=error)
            await self._tolerantly(self._later(error))
        finally:
            await end_tasks([keeping, working])

    async def _keep(self) -> None:
        """Show that the batch is run, and how far it is; learn whether it is to be cancelled."""
        while True:
            runner = self._runner
            if runner is not None and self._journal.status is Status.CANCELLING:
                await runner.cancel()
            await asyncio.sleep(min(RENEW_S, self._plan.lease_s / 4))
            fields = {} if runner is None else _progress(runner)
            # its lease may end, which the next write tells
            with contextlib.suppress(ServerLost, QueueFull):
                await self._journal.write(fields)

    async def _work(self, stop: asyncio.Event) -> None:
        resumption = await self._plan.store.resumption(self._record.id)
        checkpoint, repeated = await self._start(resumption)
        goal, parts = resumption.goal, checkpoint.parts
        if goal is None:
            client = await self._client()
            if client is None:
                await self._journal.release(delay_ms=AGAIN_MS)
                return
            runner = self._runner = self._make_runner(client, checkpoint, repeated)
            if self._journal.status is Status.CANCELLING:
                await runner.cancel()
            if not await runner.run(stop):
                self._runner = None
                await self._journal.release(_progress(runner))
                return
            goal, parts = await self._finalize(runner), runner.parts
            checkpoint = replace(checkpoint, counts=runner.counts)
        await self._join(goal, parts, checkpoint.counts)

    async def _start(self, resumption: Resumption) -> tuple[Checkpoint, frozenset[int]]:
        """Return how far the batch is; survey its file if nobody did."""
        if resumption.is_surveyed:
            repeated = decode_repeated(resumption.repeated)
            if resumption.checkpoint is None:
                counts = Counts(total=self._record.counts.total)
                return Checkpoint(counts=counts, reached=resumption.reached), repeated
            checkpoint = Checkpoint.decode(
                resumption.checkpoint, resumption.parts, resumption.reached
            )
            return checkpoint, repeated
        record = self._record
        try:
            found = await survey(
                self._plan.storage.read(record.input_file_id),
                endpoint=record.endpoint,
                terms=record.terms,
            )
        except StoredFileGone:
            raise SurveyFailed(_INPUT_GONE) from None
        counts = Counts(total=found.total)
        fields: dict[str, str | bytes | int] = {
            "surveyed": 1,
            "repeated": found.encode_repeated(),
            "counts": encode_counts(counts),
        }
        if found.model is not None:
            fields["model"] = found.model
        await self._journal.write(fields, status=Status.IN_PROGRESS)
        self._record = replace(record, model=found.model)
        logger.info("batch begins", batch=record.id, lines=found.total, model=found.model)
        return Checkpoint(counts=counts), found.repeated

    async def _client(self) -> AsyncClient | None:
        """Return the client of the model's queue; None while there is none, but may be."""
        record = self._record
        found = await find_queue(self._plan.clients, record.model, record.terms)
        is_over = self._seconds_left() <= 0 or self._journal.status is Status.CANCELLING
        if found.client is not None:
            return found.client
        if is_over or record.model is None:  # nothing new is submitted
            return self._plan.clients.of(record.terms.queues[0])
        if found.is_unknown and time.time() > record.created_at + PATIENCE_S:
            message = f"The model {record.model!r} is not served."
            raise SurveyFailed(FileFault("model_not_found", message))
        logger.warning("batch waits for a worker", batch=record.id, model=record.model)
        return None

    def _make_runner(
        self, client: AsyncClient, checkpoint: Checkpoint, repeated: frozenset[int]
    ) -> BatchRunner:
        record, storage = self._record, self._plan.storage
        answerer = LineAnswerer(
            AnsweringPlan(
                client=client,
                batch_id=record.id,
                lane=record.terms.lane,
                owner=record.owner,
                seconds_left=self._seconds_left,
            )
        )
        plan = RunPlan(
            batch_id=record.id,
            client=client,
            source=lambda offset: storage.read(record.input_file_id, offset),
            checks=LineChecks(
                endpoint=record.endpoint, model=record.model, terms=record.terms, repeated=repeated
            ),
            answerer=answerer,
            storage=storage,
            folder=record.id,
            journal=self._journal,
            window=self._plan.window,
            seconds_left=self._seconds_left,
            on_kept=self._plan.on_kept,
        )
        return BatchRunner(plan, checkpoint)

    async def _finalize(self, runner: BatchRunner) -> Status:
        """Return what the batch will be; from here on it cannot be cancelled."""
        self._runner = None
        goal = Status.EXPIRED if runner.has_expired else Status.COMPLETED
        if self._journal.status is Status.CANCELLING:
            goal = Status.CANCELLED
        fields: dict[str, str | bytes | int] = {
            "goal": goal.value,
            "counts": encode_counts(runner.counts),
        }
        await self._journal.write(fields, status=Status.FINALIZING)
        if self._journal.status is Status.CANCELLING and goal is not Status.CANCELLED:
            goal = Status.CANCELLED
            await self._journal.write({"goal": goal.value})
        return goal

    async def _join(
        self,
        goal: Status,
        parts: tuple[Part, ...],
        counts: Counts,
        faults: Sequence[FileFault] = (),
    ) -> None:
        """Put the files together and end the batch."""
        record, storage = self._record, self._plan.storage
        made = {}
        for kind in ("output", "errors"):
            file_id = _file_id(record.id, kind)
            size = await join_parts(storage, names_of(parts, kind), file_id)
            made[kind] = None if size is None else self._file_record(file_id, kind, size)
        await self._finish(goal, counts, faults, made["output"], made["errors"])
        with contextlib.suppress(StorageError):  # what stays is found by who removes old files
            await storage.delete_folder(record.id)

    async def _finish(
        self,
        goal: Status,
        counts: Counts | None,
        faults: Sequence[FileFault],
        output: FileRecord | None = None,
        errors: FileRecord | None = None,
    ) -> None:
        await self._plan.store.finish(
            self._taken,
            goal,
            record_expires_at=int(time.time()) + self._plan.file_age_s,
            counts=counts,
            faults=faults,
            output=output,
            errors=errors,
        )
        codes = [fault.code for fault in faults]
        logger.info("batch ended", batch=self._record.id, status=goal.value, faults=codes)

    def _file_record(self, file_id: str, kind: str, size: int) -> FileRecord:
        record, now = self._record, int(time.time())
        age_s = record.output_expires_after_s or self._plan.file_age_s
        return FileRecord(
            id=file_id,
            bytes=size,
            created_at=now,
            filename=f"{record.id}_{kind}.jsonl",
            purpose=OUTPUT_PURPOSE,
            owner=record.owner,
            expires_at=now + age_s,
        )

    async def _fail(self, fault: FileFault) -> None:
        """End the batch as failed, with what was answered before."""
        left = await self._plan.store.resumption(self._record.id)
        if left.checkpoint is not None:
            kept = Checkpoint.decode(left.checkpoint, left.parts, left.reached)
            try:
                await self._join(Status.FAILED, kept.parts, kept.counts, [fault])
                return
            except StorageError as error:
                logger.error("answers lost", batch=self._record.id, reason=str(error))
        await self._finish(Status.FAILED, None, [fault])

    async def _later(self, error: Exception) -> None:
        """Let the batch be tried again; give it up where that has been going on for too long."""
        if isinstance(error, StoredFileGone):
            await self._fail(_INPUT_GONE)
        elif self._seconds_left() < -GIVE_UP_S:
            await self._fail(FileFault("internal_error", f"It could not be ended: {error}"))
        else:
            await self._journal.release(delay_ms=AGAIN_MS)

    async def _tolerantly(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what the end of the lease does too, only later."""
        try:
            await work
        except InferqError as error:
            logger.warning("batch not let go", batch=self._record.id, reason=str(error))

    def _seconds_left(self) -> float:
        return self._record.expires_at - time.time()


_INPUT_GONE: Final = FileFault("input_file_gone", "A file of the batch is gone from the storage.")


def _progress(runner: BatchRunner) -> dict[str, str | bytes | int]:
    return {"counts": encode_counts(runner.counts), "reached": runner.reached}


def _file_id(batch_id: str, kind: str) -> str:
    """Return the id of a file that the batch makes: the same, whoever makes it."""
    return "file-" + hashlib.sha256(f"{batch_id}\n{kind}".encode()).hexdigest()[:32]
