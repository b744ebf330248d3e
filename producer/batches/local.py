"""A batch from one local file to another, without a gateway; what was answered survives a kill."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from inferq.producer.async_client import AsyncClient
from inferq.producer.batches.answering import AnsweringPlan, LineAnswerer
from inferq.producer.batches.journals import Checkpoint
from inferq.producer.batches.lines import LineChecks
from inferq.producer.batches.models import QueueClients, find_queue
from inferq.producer.batches.records import Counts, Terms, new_batch_id
from inferq.producer.batches.running import BatchRunner, RunPlan
from inferq.producer.batches.storage import READ_BYTES, FileStorage, StorageError
from inferq.producer.batches.surveys import Survey, survey
from inferq.producer.server import end_tasks
from inferq.protocol.errors import InferqError, InvalidRequestError

logger = structlog.get_logger("inferq.batches")

#: Seconds between two signs of progress, and between two looks for a worker of the model.
PROGRESS_S: Final = 0.2
LOOK_S: Final = 2.0
#: Seconds after which lines that have ended are written, however few.
PART_S: Final = 5.0

_PARTS: Final = "parts"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBatch:
    """What is to be done: lines of `input`, to `output`, and those that failed to `errors`.

    Without `errors` they go to the output too. `endpoint` None takes that of the first line.
    """

    input: Path
    output: Path
    errors: Path | None
    terms: Terms
    endpoint: str | None = None
    window: int = 256

    @property
    def folder(self) -> Path:
        """Where it keeps what it has until the output is whole: beside it."""
        return self.output.parent / f".{self.output.name}.batch"


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
    Raises `SurveyFailed` for an input that is no batch, `InvalidRequestError` (field `input` or
    `output`) where files are not as they must be, and `ServerLost` if the server is away at first.
    """
    with _locked(batch):
        state = _State.load(batch)
        is_new = state is None
        if state is None:
            _check_free(batch)
            state = await _State.begin(batch)
        else:
            await state.check(batch)
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
        counts, is_complete = await _run(batch, state, client, stop, on_progress)
        on_progress(counts)
        if is_complete:
            await asyncio.to_thread(_join, batch, state.checkpoint)
        return LocalResult(counts, is_complete, resumed)


async def _run(
    batch: LocalBatch,
    state: _State,
    client: AsyncClient,
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
        source=lambda offset: _read(batch.input, offset),
        checks=LineChecks(
            endpoint=found.endpoint or "",
            model=found.model,
            terms=batch.terms,
            repeated=found.repeated,
        ),
        answerer=answerer,
        storage=FileStorage(str(batch.folder)),
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


class _State:
    """The journal of a local batch: one file, replaced as a whole."""

    #: One process runs the batch at a time, by its lock: names of parts need no more.
    token = "local"  # noqa: S105 - no secret

    def __init__(self, path: Path, batch_id: str, digest: str, terms: str, found: Survey) -> None:
        self._path = path
        self.batch_id = batch_id
        self.digest = digest
        self.terms = terms
        self.survey = found
        self.checkpoint = Checkpoint(counts=Counts(total=found.total))

    @classmethod
    async def begin(cls, batch: LocalBatch) -> _State:
        """Survey the input and keep what was found."""
        hasher = hashlib.sha256()

        async def chunks() -> AsyncIterator[bytes]:
            async for chunk in _read(batch.input, 0):
                hasher.update(chunk)
                yield chunk

        found = await survey(chunks(), endpoint=batch.endpoint, terms=batch.terms)
        state = cls(
            batch.folder / "state.json",
            new_batch_id(),
            hasher.hexdigest(),
            batch.terms.encode(),
            found,
        )
        await asyncio.to_thread(state._write)
        return state

    @classmethod
    def load(cls, batch: LocalBatch) -> _State | None:
        """Return what an earlier run left; raise `InvalidRequestError` if it cannot be read."""
        path = batch.folder / "state.json"
        try:
            wire: dict[str, Any] = json.loads(path.read_bytes())
            if wire["version"] != _VERSION:
                raise ValueError(f"version {wire['version']}")
            found = Survey(**{**wire["survey"], "repeated": frozenset(wire["survey"]["repeated"])})
            state = cls(path, wire["batch_id"], wire["digest"], wire["terms"], found)
            state.checkpoint = Checkpoint.decode(wire["checkpoint"], wire["parts"], wire["reached"])
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidRequestError(
                f"{batch.folder} cannot be read ({error}); remove it to begin anew", field="output"
            ) from None
        return state

    async def check(self, batch: LocalBatch) -> None:
        """Raise `InvalidRequestError` if this is not what the earlier run was about."""
        hasher = hashlib.sha256()
        async for chunk in _read(batch.input, 0):
            hasher.update(chunk)
        problem = ""
        if hasher.hexdigest() != self.digest:
            problem = f"{batch.input} has changed since {batch.output} was begun"
        elif batch.terms.encode() != self.terms:
            problem = f"{batch.output} was begun with another queue or model"
        if problem:
            raise InvalidRequestError(
                f"{problem}; remove {batch.folder} to begin anew", field="input"
            )

    async def save(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint; raise `StorageError`."""
        before, self.checkpoint = self.checkpoint, checkpoint
        try:
            await asyncio.to_thread(self._write)
        except OSError as error:
            self.checkpoint = before
            raise StorageError(f"{self._path}: {error}") from error

    def forget(self) -> None:
        """Remove what was kept, so that the next run begins anew."""
        self._path.unlink()

    def _write(self) -> None:
        found = self.survey
        wire = {
            "version": _VERSION,
            "batch_id": self.batch_id,
            "digest": self.digest,
            "terms": self.terms,
            "survey": {**asdict(found), "repeated": sorted(found.repeated)},
            "checkpoint": self.checkpoint.encode(),
            "reached": self.checkpoint.reached,
            "parts": [part.encode() for part in self.checkpoint.parts],
        }
        with _replacing(self._path) as file:
            file.write(json.dumps(wire).encode())


async def _read(path: Path, offset: int) -> AsyncIterator[bytes]:
    """Yield a local file's bytes from an offset on; raise `InvalidRequestError`."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while data := await asyncio.to_thread(file.read, READ_BYTES):
                yield data
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}", field="input") from None


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
            if not (folder / "state.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _check_free(batch: LocalBatch) -> None:
    """Raise `InvalidRequestError` if there are files already: nothing is overwritten."""
    for path in (batch.output, batch.errors):
        if path is not None and path.exists():
            raise InvalidRequestError(f"{path} exists", field="output")


def _join(batch: LocalBatch, checkpoint: Checkpoint) -> None:
    """Write the output, then the errors, each as a whole, and remove what they were made from."""
    errors = [part.errors for part in checkpoint.parts if part.errors is not None]
    names = [part.output for part in checkpoint.parts if part.output is not None]
    try:
        if batch.errors is None:
            _concatenate(batch.folder, names + errors, batch.output)
        else:
            _concatenate(batch.folder, errors, batch.errors)
            _concatenate(batch.folder, names, batch.output)
    except OSError as error:
        raise StorageError(f"{batch.output}: {error}") from error
    shutil.rmtree(batch.folder)


def _concatenate(folder: Path, names: list[str], target: Path) -> None:
    with _replacing(target) as file:
        for name in names:
            with (folder / name).open("rb") as part:
                shutil.copyfileobj(part, file)


@contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """Write a file that takes the place of `path` once it is whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
