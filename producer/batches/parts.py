"""Lines that have ended: gathered, written in parts, and joined in the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inferq.producer.batches.journals import Part, part_name
from inferq.producer.batches.storage import FileStorage


@dataclass(slots=True)
class Gathered:
    """Lines that have ended and are in no part yet, one after the other.

    They are copied: an entry that orjson made takes 4 KiB, however short it is.
    """

    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    #: The jobs behind them, whose results need not be kept longer than until then.
    job_ids: list[str] = field(default_factory=list)
    num_lines: int = 0

    def add(self, entry: bytes, *, is_success: bool, job_ids: Sequence[str]) -> None:
        """Take a line."""
        (self.output if is_success else self.errors).extend(entry)
        self.job_ids.extend(job_ids)
        self.num_lines += 1

    @property
    def size(self) -> int:
        """The bytes of all lines."""
        return len(self.output) + len(self.errors)


async def write_part(
    storage: FileStorage, folder: str, number: int, token: str, gathered: Gathered
) -> Part:
    """Write what is gathered and return it as a part that is whole; raise `StorageError`."""
    names: list[str | None] = []
    for kind, lines in (("output", gathered.output), ("errors", gathered.errors)):
        name = part_name(folder, kind, number, token) if lines else None
        if name is not None:
            async with storage.writer(name) as writer:
                await writer.write(lines)
                await writer.commit()
        names.append(name)
    return Part(*names)


async def join_parts(storage: FileStorage, names: Sequence[str], target: str) -> int | None:
    """Write the parts, one after the other, as one file; return its size, None without parts."""
    if not names:
        return None
    async with storage.writer(target) as writer:
        for name in names:
            async for data in storage.read(name):
                await writer.write(data)
        await writer.commit()
        return writer.size
