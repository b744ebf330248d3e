"""The files that a local batch makes in the end: each whole, and none in place of another."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from inferq.producer.batches.journals import Checkpoint, names_of
from inferq.producer.batches.local_state import LocalBatch, LocalState
from inferq.producer.batches.storage import READ_BYTES, StorageError
from inferq.protocol.errors import InvalidRequestError

#: What file systems answer that have no hard links.
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


@dataclass(frozen=True, slots=True)
class _Target:
    """A file to be made of parts, in order; `field` is what the caller knows it by."""

    field: str
    path: Path
    parts: tuple[Path, ...]


def check_paths(batch: LocalBatch) -> None:
    """Raise `InvalidRequestError` where the files of a batch could not both be made."""
    if batch.errors is None:
        return
    errors = batch.errors.resolve()
    if errors == batch.output.resolve():
        raise InvalidRequestError("is the output; leave it out to have all in one", field="errors")
    if errors.is_relative_to(batch.folder.resolve()):
        raise InvalidRequestError(f"{batch.folder} is removed in the end", field="errors")
    if not errors.parent.is_dir():
        raise InvalidRequestError(f"{errors.parent} is no folder", field="errors")


def check_free(batch: LocalBatch, state: LocalState | None = None) -> None:
    """Raise `InvalidRequestError` if there are files already, which are nobody's to overwrite.

    What an earlier run put there before it was killed is what this one would write, byte by byte.
    Raises `StorageError` where that cannot be read.
    """
    checkpoint = Checkpoint() if state is None else state.checkpoint
    is_answered = state is not None and checkpoint.counts.ended == state.survey.total
    for target in _targets(batch, checkpoint):
        if os.path.lexists(target.path) and not (is_answered and _is_made(target)):
            raise _exists(target)


def make_files(batch: LocalBatch, state: LocalState) -> None:
    """Make the errors, then the output; an earlier run's of the same bytes stay.

    Raises `InvalidRequestError` where others are in the way, and `StorageError`; then all that was
    answered is kept, and the same call goes on.
    """
    check_free(batch, state)
    for target in _targets(batch, state.checkpoint):
        if not os.path.lexists(target.path):
            _make(target, state.batch_id)


def _targets(batch: LocalBatch, checkpoint: Checkpoint) -> list[_Target]:
    def parts(kind: str) -> tuple[Path, ...]:
        return tuple(batch.folder / name for name in names_of(checkpoint.parts, kind))

    output, errors = parts("output"), parts("errors")
    if batch.errors is None:
        return [_Target("output", batch.output, output + errors)]
    return [_Target("errors", batch.errors, errors), _Target("output", batch.output, output)]


def _exists(target: _Target) -> InvalidRequestError:
    return InvalidRequestError(f"{target.path} exists", field=target.field)


def _is_made(target: _Target) -> bool:
    """Whether the file has the very bytes that it is to have."""
    if not target.path.is_file():
        return False
    with _storage_errors(target), target.path.open("rb") as file:
        for path in target.parts:
            with path.open("rb") as part:
                while data := part.read(READ_BYTES):
                    if file.read(len(data)) != data:
                        return False
        return not file.read(1)


def _make(target: _Target, batch_id: str) -> None:
    """Write a file beside its place, under a name that is this batch's alone, and put it there."""
    temporary = target.path.with_name(f".{target.field}-{batch_id}.tmp")
    with _storage_errors(target):
        try:
            with temporary.open("wb") as file:
                for path in target.parts:
                    with path.open("rb") as part:
                        shutil.copyfileobj(part, file)
                file.flush()
                os.fsync(file.fileno())
            _place(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(target.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _place(temporary: Path, target: _Target) -> None:
    """Give a file its name, unless another has it: a rename would replace that one."""
    try:
        try:
            os.link(temporary, target.path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            target.path.open("xb").close()
            temporary.replace(target.path)
    except FileExistsError:
        raise _exists(target) from None


@contextmanager
def _storage_errors(target: _Target) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{target.path}: {error}") from error
