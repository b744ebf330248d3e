"""A worker's KV blocks at one moment, as they are shown while somebody watches its queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from inferq.protocol.errors import DecodeError
from inferq.protocol.wire import pack, typed, unpack

#: Longest snapshot that is read, in bytes: of some millions of blocks, each another's neighbour.
MAX_SNAPSHOT_BYTES: Final = 16 * 2**20
#: Digits of a job's id that a snapshot tells: too few to ask for the job with.
SHORT_ID_DIGITS: Final = 6


class BlockState(IntEnum):
    """What a block is, as numbers that travel."""

    FREE = 0
    #: Free, with a prefix that can be reused.
    CACHED = 1
    #: Held by one sequence.
    USED = 2
    #: Held by several.
    SHARED = 3
    #: A block of host memory that swapped sequences hold.
    SWAPPED = 4


#: Their names, by their numbers.
BLOCK_STATES: Final = tuple(state.name.lower() for state in BlockState)


@dataclass(frozen=True, slots=True)
class HoldingSequence:
    """A sequence that holds blocks: the end of its job's id, and its prompt and output tokens."""

    job: str
    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """The blocks of the device, then those of the host, as runs of equal ones.

    `runs` has four numbers for each: how many blocks, their `BlockState`, how many sequences
    hold each of them, and the place in `sequences` of the first of these (0: there is none).
    """

    num_blocks: int
    num_host_blocks: int
    runs: Sequence[int]
    sequences: Sequence[HoldingSequence]

    def counts(self) -> dict[str, int]:
        """Return how many blocks are what; `free` are those of the device."""
        counts = dict.fromkeys(BLOCK_STATES, 0)
        for count, state in zip(self.runs[::4], self.runs[1::4], strict=True):
            counts[BLOCK_STATES[state]] += count
        counts["free"] -= self.num_host_blocks - counts["swapped"]
        return counts

    def encode(self) -> bytes:
        """Return the msgpack map."""
        rows = [(each.job, each.index, each.num_tokens) for each in self.sequences]
        return pack({"b": self.num_blocks, "h": self.num_host_blocks, "r": self.runs, "s": rows})

    @classmethod
    def decode(cls, payload: bytes) -> BlockSnapshot:
        """Read a snapshot; raise `DecodeError` for what is none."""
        wire = unpack(payload, MAX_SNAPSHOT_BYTES)
        try:
            snapshot = cls(
                num_blocks=typed(wire, "b", int),
                num_host_blocks=typed(wire, "h", int),
                runs=typed(wire, "r", list),
                sequences=[_sequence(row) for row in typed(wire, "s", list)],
            )
            _check(snapshot)
        except (LookupError, TypeError, ValueError) as error:
            raise DecodeError(f"block snapshot: {error}", payload) from None
        return snapshot


def short_id(job_id: str) -> str:
    """Return the digits of a job's id by which people tell jobs apart."""
    return job_id.partition("-")[0][-SHORT_ID_DIGITS:]


def _sequence(row: Any) -> HoldingSequence:
    job, index, num_tokens = row
    if not isinstance(job, str) or type(index) is not int or type(num_tokens) is not int:
        raise TypeError(f"{row!r} is no sequence")
    return HoldingSequence(job, index, num_tokens)


def _check(snapshot: BlockSnapshot) -> None:
    runs = snapshot.runs
    if len(runs) % 4 or not set(map(type, runs)) <= {int} or min(runs, default=0) < 0:
        raise ValueError("runs are not of four counts each")
    if sum(runs[::4]) != snapshot.num_blocks + snapshot.num_host_blocks:
        raise ValueError("runs do not cover the blocks")
    if max(runs[1::4], default=0) >= len(BLOCK_STATES):
        raise ValueError("a state that there is not")
    if max(runs[3::4], default=0) >= max(1, len(snapshot.sequences)):
        raise ValueError("a sequence that there is not")
