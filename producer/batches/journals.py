"""How far a batch has come, as whoever runs it next finds it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from inferq.producer.batches.records import Counts, Status, decode_counts, encode_counts
from inferq.producer.batches.store import BatchLost, BatchStore, TakenBatch
from inferq.producer.batches.windows import Position


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a batch's output that is whole in the storage: names of its files, if any."""

    output: str | None
    errors: str | None

    def encode(self) -> str:
        """Return the part as JSON."""
        return json.dumps([self.output, self.errors])

    @classmethod
    def decode(cls, payload: bytes | str) -> Self:
        """Rebuild a part."""
        output, errors = json.loads(payload)
        return cls(output, errors)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What lies in parts: the lines before `position`, their counts, and the parts themselves.

    Lines after `reached` were surely not submitted by any earlier run, but for its last seconds.
    """

    position: Position = field(default_factory=Position)
    counts: Counts = field(default_factory=Counts)
    reached: int = 0
    parts: tuple[Part, ...] = ()

    def encode(self) -> str:
        """Return it as JSON, without the parts."""
        position = self.position
        return json.dumps(
            {
                "offset": position.offset,
                "line": position.line,
                "done": position.done,
                "counts": encode_counts(self.counts),
            }
        )

    @classmethod
    def decode(cls, payload: bytes | str, parts: Iterable[bytes | str], reached: int) -> Self:
        """Rebuild it from its JSON and its parts."""
        wire: dict[str, Any] = json.loads(payload)
        position = Position(wire["offset"], wire["line"], tuple(wire["done"]))
        counts = decode_counts(wire["counts"])
        return cls(position, counts, reached, tuple(map(Part.decode, parts)))


class Journal(Protocol):
    """Keeps a batch's checkpoints; its writes fail once another process runs the batch."""

    @property
    def token(self) -> str:
        """Text that no two runs of a batch have in common."""

    async def save(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint, whose last part is new; twice is as good as once."""


@dataclass(slots=True)
class RedisJournal:
    """The journal of a batch that this process has taken."""

    store: BatchStore
    taken: TakenBatch
    lease_ms: int
    status: Status = field(init=False)
    _lock: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    _is_released: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.status = self.taken.record.status

    @property
    def token(self) -> str:
        """The token of the lease."""
        return str(self.taken.token)

    async def save(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint; raise `BatchLost` or `ServerLost`."""
        await self.write(
            {
                "checkpoint": checkpoint.encode(),
                "counts": encode_counts(checkpoint.counts),
                "reached": checkpoint.reached,
            },
            part=(len(checkpoint.parts) - 1, checkpoint.parts[-1].encode()),
        )

    async def write(
        self,
        fields: dict[str, str | bytes | int],
        *,
        status: Status | None = None,
        part: tuple[int, str] | None = None,
    ) -> None:
        """Write fields, renew the lease, and note the status; raise `BatchLost`."""
        async with self._lock:  # a sign of life must not come after the release
            if self._is_released:
                raise BatchLost(f"batch {self.taken.record.id} was released")
            self.status = await self.store.write(
                self.taken, fields, lease_ms=self.lease_ms, status=status, part=part
            )

    async def release(
        self, fields: dict[str, str | bytes | int] | None = None, *, delay_ms: int = 0
    ) -> None:
        """Write fields and let others take the batch; raise `BatchLost`."""
        async with self._lock:
            self._is_released = True
            await self.store.write(self.taken, fields or {}, lease_ms=delay_ms)


def part_name(folder: str, kind: str, number: int, token: str) -> str:
    """Return the name of a part's file, which no other run of the batch makes."""
    return f"{folder}/{kind}-{number:06d}-{token}.jsonl"


def names_of(parts: Sequence[Part], kind: str) -> list[str]:
    """Return the names of one kind of files, in order."""
    names = (part.output if kind == "output" else part.errors for part in parts)
    return [name for name in names if name is not None]
