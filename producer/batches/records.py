"""What is known of a file and of a batch: frozen records, and how they lie in a Redis hash."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, Self

from inferq.protocol.errors import DecodeError
from inferq.protocol.keys import Lane
from inferq.protocol.wire import text

#: What Redis returns of a hash.
Hash = Mapping[bytes, bytes]

#: Where a batch's requests may go.
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions")
#: Purposes that a file may have: uploaded as input, or made by a batch.
INPUT_PURPOSE: Final = "batch"
OUTPUT_PURPOSE: Final = "batch_output"
#: Faults of a file that are named, at most.
MAX_FAULTS: Final = 50

_FILE_ID: Final = re.compile(r"file-[0-9a-f]{32}")
_BATCH_ID: Final = re.compile(r"batch_[0-9a-f]{32}")


def new_file_id() -> str:
    """Make the id of a file, which is its name in the storage too."""
    return f"file-{secrets.token_hex(16)}"


def new_batch_id() -> str:
    """Make the id of a batch."""
    return f"batch_{secrets.token_hex(16)}"


def is_file_id(given: str) -> bool:
    """Whether it is in the form of a file's id."""
    return _FILE_ID.fullmatch(given) is not None


def is_batch_id(given: str) -> bool:
    """Whether it is in the form of a batch's id."""
    return _BATCH_ID.fullmatch(given) is not None


class Status(StrEnum):
    """Where a batch stands, in OpenAI's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing will change any more."""
        return self in _FINAL


_FINAL: Final = frozenset({Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file that is whole in the storage; times are in seconds since 1970.

    `owner` is the id of the API key that it belongs to, None without keys.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    owner: str | None = None
    expires_at: int | None = None

    def to_hash(self) -> dict[str, str | int]:
        """Return the fields of its Redis hash."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_hash(cls, row: Hash) -> Self | None:
        """Rebuild it; None for a hash that is not there. Raises `DecodeError`."""
        if b"id" not in row:
            return None
        with _decoding(row):
            return cls(
                id=text(row[b"id"]),
                bytes=int(row[b"bytes"]),
                created_at=int(row[b"created_at"]),
                filename=text(row[b"filename"]),
                purpose=text(row[b"purpose"]),
                owner=_text(row, b"owner"),
                expires_at=_number(row, b"expires_at"),
            )


@dataclass(frozen=True, slots=True)
class FileFault:
    """Why a whole batch failed; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """How many lines there are and how they ended so far, and the tokens of those completed."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def ended(self) -> int:
        """Lines that have ended."""
        return self.completed + self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a batch's requests are checked and answered by: what the gateway's settings were.

    - `models`: queues of models that are known while no worker lives, by model's name.
    - `queues`: those whose workers may serve the batch.
    - `allowed_models`: what the owner's key may use; None: all.
    - `default_model`: of lines that name none; None: each must.
    - `lane`: of all its jobs.
    """

    queues: tuple[str, ...]
    models: Mapping[str, str] = field(default_factory=dict)
    allowed_models: tuple[str, ...] | None = None
    default_model: str | None = None
    lane: Lane = Lane.LOW
    default_max_tokens: int | None = None
    tool_format: str = "hermes"
    accept_webhooks: bool = False
    max_prompts: int = 1024
    max_outputs: int = 2048

    def encode(self) -> str:
        """Return the terms as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, payload: bytes | str) -> Self:
        """Rebuild the terms; raise `ValueError`, `LookupError` or `TypeError` for what are none."""
        wire = _known(cls, json.loads(payload))
        allowed, queues = wire.get("allowed_models"), tuple(wire["queues"])
        if not queues:
            raise ValueError("the terms name no queue")
        return cls(
            **{
                **wire,
                "queues": queues,
                "allowed_models": None if allowed is None else tuple(allowed),
                "lane": Lane(wire.get("lane", Lane.LOW)),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """OpenAI's Batch object, whose it is, and by what it is run; times in seconds since 1970."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    terms: Terms
    completion_window: str = "24h"
    owner: str | None = None
    metadata: Mapping[str, str] | None = None
    #: Seconds that output files are kept; None: as long as any file.
    output_expires_after_s: int | None = None

    status: Status = Status.VALIDATING
    model: str | None = None
    counts: Counts = Counts()
    errors: tuple[FileFault, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    def to_hash(self) -> dict[str, str | int]:
        """Return the fields of the Redis hash of a batch that has just been made."""
        fields: dict[str, str | int | None] = {
            "id": self.id,
            "endpoint": self.endpoint,
            "input_file_id": self.input_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "terms": self.terms.encode(),
            "completion_window": self.completion_window,
            "owner": self.owner,
            "metadata": None if self.metadata is None else json.dumps(dict(self.metadata)),
            "output_expires_after_s": self.output_expires_after_s,
            "status": self.status.value,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @classmethod
    def from_hash(cls, row: Hash) -> Self | None:
        """Rebuild it; None for a hash that is not there. Raises `DecodeError`."""
        if b"id" not in row:
            return None
        with _decoding(row):
            metadata = row.get(b"metadata")
            times = {name: _number(row, name.encode()) for name in _TIMES}
            texts = {name: _text(row, name.encode()) for name in _TEXTS}
            faults = json.loads(row.get(b"errors", b"[]"))
            return cls(
                id=text(row[b"id"]),
                endpoint=text(row[b"endpoint"]),
                input_file_id=text(row[b"input_file_id"]),
                created_at=int(row[b"created_at"]),
                expires_at=int(row[b"expires_at"]),
                terms=Terms.decode(row[b"terms"]),
                completion_window=text(row[b"completion_window"]),
                metadata=None if metadata is None else json.loads(metadata),
                output_expires_after_s=_number(row, b"output_expires_after_s"),
                status=Status(text(row[b"status"])),
                counts=decode_counts(row.get(b"counts")),
                errors=tuple(FileFault(**_known(FileFault, fault)) for fault in faults),
                **times,
                **texts,
            )


_TIMES: Final = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
_TEXTS: Final = ("owner", "model", "output_file_id", "error_file_id")


def encode_counts(counts: Counts) -> str:
    """Return counts as JSON."""
    return json.dumps(asdict(counts))


def decode_counts(payload: bytes | str | None) -> Counts:
    """Rebuild counts; zeros where there are none yet."""
    return Counts() if payload is None else Counts(**_known(Counts, json.loads(payload)))


def encode_faults(faults: Sequence[FileFault]) -> str:
    """Return the first faults as JSON."""
    return json.dumps([asdict(fault) for fault in faults[:MAX_FAULTS]])


def _known(kind: type[Any], wire: Any) -> dict[str, Any]:
    """Return what a dataclass has fields for: a newer version may have written more."""
    if not isinstance(wire, Mapping):
        raise TypeError(f"{kind.__name__} is not a map")
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in wire.items() if name in names}


@contextmanager
def _decoding(row: Hash) -> Iterator[None]:
    """Say of which record it is that something in it is not as it must be."""
    try:
        yield
    except (ValueError, LookupError, TypeError) as error:
        name = row[b"id"][:80].decode(errors="replace")
        raise DecodeError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def _text(row: Hash, name: bytes) -> Any:
    value = row.get(name)
    return None if value is None else value.decode()


def _number(row: Hash, name: bytes) -> Any:
    value = row.get(name)
    return None if value is None else int(value)
