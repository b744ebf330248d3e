"""What a local batch is to do, and how far it has come: one file beside the output."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from inferq.producer.batches.journals import Checkpoint
from inferq.producer.batches.records import Counts, Terms, new_batch_id
from inferq.producer.batches.storage import READ_BYTES, StorageError
from inferq.producer.batches.surveys import Survey, survey
from inferq.protocol.errors import InvalidRequestError

_VERSION: Final = 2


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

    @property
    def state_path(self) -> Path:
        """Where it keeps how far it has come."""
        return self.folder / "state.json"


class LocalState:
    """The journal of a local batch: one file, replaced as a whole."""

    #: One process runs the batch at a time, by its lock: names of parts need no more.
    token = "local"  # noqa: S105 - no secret

    def __init__(
        self, path: Path, batch_id: str, digest: str, terms: str, errors: str | None, found: Survey
    ) -> None:
        self._path = path
        self.batch_id = batch_id
        self.digest = digest
        self.terms = terms
        self.errors = errors
        self.survey = found
        self.checkpoint = Checkpoint(counts=Counts(total=found.total))

    @classmethod
    async def begin(cls, batch: LocalBatch) -> LocalState:
        """Survey the input and keep what was found.

        Raises `SurveyFailed`, `InvalidRequestError` for an input that cannot be read, and
        `StorageError`.
        """
        hasher = hashlib.sha256()

        async def chunks() -> AsyncGenerator[bytes]:
            async with aclosing(read_input(batch.input, 0)) as content:
                async for chunk in content:
                    hasher.update(chunk)
                    yield chunk

        found = await survey(chunks(), endpoint=batch.endpoint, terms=batch.terms)
        state = cls(
            batch.state_path,
            new_batch_id(),
            hasher.hexdigest(),
            batch.terms.encode(),
            _errors_of(batch),
            found,
        )
        await state._keep()
        return state

    @classmethod
    def load(cls, batch: LocalBatch) -> LocalState | None:
        """Return what an earlier run left; raise `InvalidRequestError` if it cannot be read."""
        path = batch.state_path
        try:
            wire: dict[str, Any] = json.loads(path.read_bytes())
            if wire["version"] != _VERSION:
                raise ValueError(f"version {wire['version']}")
            found = Survey(**{**wire["survey"], "repeated": frozenset(wire["survey"]["repeated"])})
            state = cls(
                path, wire["batch_id"], wire["digest"], wire["terms"], wire["errors"], found
            )
            state.checkpoint = Checkpoint.decode(wire["checkpoint"], wire["parts"], wire["reached"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidRequestError(
                f"{batch.folder} cannot be read ({error}); remove it to begin anew", field="output"
            ) from None
        return state

    async def check(self, batch: LocalBatch) -> None:
        """Raise `InvalidRequestError` if this is not what the earlier run was about."""
        hasher = hashlib.sha256()
        async with aclosing(read_input(batch.input, 0)) as content:
            async for chunk in content:
                hasher.update(chunk)
        problem, field = "", "input"
        if hasher.hexdigest() != self.digest:
            problem = f"{batch.input} has changed since {batch.output} was begun"
        elif batch.terms.encode() != self.terms:
            problem = f"{batch.output} was begun with another queue or model"
        elif _errors_of(batch) != self.errors:
            before = "no file of errors" if self.errors is None else f"errors in {self.errors}"
            problem, field = f"{batch.output} was begun with {before}", "errors"
        if problem:
            raise InvalidRequestError(
                f"{problem}; remove {batch.folder} to begin anew", field=field
            )

    async def save(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint; raise `StorageError`."""
        before, self.checkpoint = self.checkpoint, checkpoint
        try:
            await self._keep()
        except StorageError:
            self.checkpoint = before
            raise

    def forget(self) -> None:
        """Remove what was kept, so that the next run begins anew; raise `StorageError`."""
        try:
            self._path.unlink()
        except OSError as error:
            raise StorageError(f"{self._path}: {error}") from error

    async def _keep(self) -> None:
        try:
            await asyncio.to_thread(self._write)
        except OSError as error:
            raise StorageError(f"{self._path}: {error}") from error

    def _write(self) -> None:
        found = self.survey
        wire = {
            "version": _VERSION,
            "batch_id": self.batch_id,
            "digest": self.digest,
            "terms": self.terms,
            "errors": self.errors,
            "survey": {**asdict(found), "repeated": sorted(found.repeated)},
            "checkpoint": self.checkpoint.encode(),
            "reached": self.checkpoint.reached,
            "parts": [part.encode() for part in self.checkpoint.parts],
        }
        temporary = self._path.with_name(f"{self._path.name}.tmp")  # the folder is ours alone
        with temporary.open("wb") as file:
            file.write(json.dumps(wire).encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)


async def read_input(path: Path, offset: int) -> AsyncGenerator[bytes]:
    """Yield a local file's bytes from an offset on; raise `InvalidRequestError`."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while data := await asyncio.to_thread(file.read, READ_BYTES):
                yield data
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}", field="input") from None


def _errors_of(batch: LocalBatch) -> str | None:
    """Return where the errors go, however the command spells it."""
    return None if batch.errors is None else str(batch.errors.resolve())
