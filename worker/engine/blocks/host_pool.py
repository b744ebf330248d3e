"""The host's pool of blocks, which hold the KV of sequences that are swapped out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class HostPool:
    """Reference-counted host blocks, so that what was shared on the device moves and lies once."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table references."""
        return self.num_blocks - len(self._free)

    def store(
        self, block_tables: Iterable[Sequence[int]]
    ) -> tuple[list[list[int]], dict[int, int]]:
        """Give each distinct block of the device tables a host block.

        Return the host tables and the moves, from device block to host block; raise `LookupError`
        if there are too few free blocks.
        """
        tables = list(block_tables)
        distinct = dict.fromkeys(block for table in tables for block in table)
        if len(distinct) > len(self._free):
            raise LookupError(
                f"{len(distinct)} host blocks wanted, {len(self._free)} of {self.num_blocks} free"
            )
        moves = {block: self._free.pop() for block in distinct}
        host_tables = [[moves[block] for block in table] for table in tables]
        for host_table in host_tables:
            self._references.update(host_table)
        return host_tables, moves

    def release(self, host_table: Iterable[int]) -> None:
        """Drop one reference from each block."""
        for block in host_table:
            if self._references[block] == 0:
                raise RuntimeError(f"host block {block} is released more often than it was stored")
            self._references[block] -= 1
            if self._references[block] == 0:
                del self._references[block]
                self._free.append(block)

    def check_integrity(self, host_tables: Iterable[Sequence[int]]) -> None:
        """Raise `RuntimeError` unless the books agree with all the host tables."""
        expected = Counter(block for table in host_tables for block in table)
        if expected != self._references:
            raise RuntimeError(f"host pool: {self._references}, but expected {expected}")
        idle = sorted(set(range(self.num_blocks)) - expected.keys())
        if sorted(self._free) != idle:
            raise RuntimeError(f"host pool: free {sorted(self._free)}, but expected {idle}")
