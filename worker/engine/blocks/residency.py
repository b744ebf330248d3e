"""Where each sequence's KV lies: on the device, in host memory, or nowhere."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain

from inferq.worker.engine.blocks.block_pool import BlockPool
from inferq.worker.engine.blocks.host_pool import HostPool
from inferq.worker.engine.requests.sequence import Sequence, SequenceStatus
from inferq.worker.engine.scheduling.plan import BlockCopy
from inferq.worker.engine.scheduling.sequence_queue import SequenceQueue


class Residency:
    """The running, the swapped and the waiting sequences, and the blocks that they hold.

    Every change of a sequence's status goes through here, so that queues, block tables and pools
    agree at any time.
    """

    def __init__(self, pool: BlockPool, host: HostPool) -> None:
        self.pool = pool
        self.host = host
        self.running = SequenceQueue()
        self.swapped = SequenceQueue()
        self.waiting = SequenceQueue()
        self._num_spare_slots = 0

    @property
    def num_slots(self) -> int:
        """Running sequences, those included that running ones are to be forked into."""
        return len(self.running) + self._num_spare_slots

    def start(self, sequence: Sequence, block_ids: list[int]) -> None:
        """Let a waiting sequence run, with cached blocks that hold its beginning."""
        self.hit(sequence, block_ids)
        self.waiting.remove(sequence)
        self._run(sequence)

    def hit(self, sequence: Sequence, block_ids: list[int]) -> None:
        """Give a sequence without blocks cached ones that hold its beginning."""
        self.pool.acquire(block_ids)
        sequence.block_table = block_ids
        sequence.num_computed_tokens = len(block_ids) * self.pool.block_size

    def drop(self, sequence: Sequence) -> None:
        """Take the blocks of a running or swapped sequence; it waits to be computed again."""
        self._leave(sequence)
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)

    def swap_out(self, sequences: SequenceOf[Sequence]) -> list[BlockCopy]:
        """Move running sequences to the host's pool, which has room; shared blocks stay shared."""
        host_tables, moves = self.host.store(s.block_table for s in sequences)
        for sequence, host_table in zip(sequences, host_tables, strict=True):
            self._leave(sequence)
            sequence.host_table = host_table
            sequence.status = SequenceStatus.SWAPPED
            self.swapped.add(sequence)
        return [BlockCopy(block, host_block) for block, host_block in moves.items()]

    def swap_in(self, sequences: SequenceOf[Sequence]) -> list[BlockCopy]:
        """Bring swapped sequences back, into as many free blocks as they hold distinct ones."""
        distinct = dict.fromkeys(block for s in sequences for block in s.host_table)
        moves = dict(zip(distinct, self.pool.allocate(len(distinct)), strict=True))
        acquired: set[int] = set()
        for sequence in sequences:
            table = [moves[block] for block in sequence.host_table]
            self.pool.acquire(block for block in table if block in acquired)
            acquired.update(table)
            self._leave(sequence)
            sequence.block_table = table
            self._run(sequence)
        return [BlockCopy(host_block, block) for host_block, block in moves.items()]

    def fork(self, sequence: Sequence, child_index: int) -> Sequence:
        """Let another sequence run on from the same tokens in the same blocks."""
        child = sequence.fork(child_index)
        self.pool.acquire(child.block_table)
        self.running.add(child)
        return child

    def keep_slots(self, sequence: Sequence, num_spare: int) -> None:
        """Let a sequence count for `num_spare` more than itself."""
        if sequence.status is SequenceStatus.RUNNING:
            self._num_spare_slots += num_spare - sequence.spare_slots
        sequence.spare_slots = num_spare

    def reindex(self, sequence: Sequence, child_index: int) -> None:
        """Make the sequence another child, in its queue too."""
        queue = self._queue(sequence)
        queue.remove(sequence)
        sequence.child_index = child_index
        sequence.order = (*sequence.order[:3], child_index)
        queue.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence wherever it stands; its blocks are free at once."""
        self._leave(sequence)
        sequence.status = SequenceStatus.FINISHED

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless blocks, queues and sequences account for each other."""
        everyone = list(chain(self.running, self.swapped, self.waiting))
        self.pool.check_integrity(s.block_table for s in everyone)
        self.host.check_integrity(s.host_table for s in everyone)
        for sequence in everyone:
            held = {
                SequenceStatus.RUNNING: not sequence.host_table,
                SequenceStatus.SWAPPED: not sequence.block_table,
                SequenceStatus.WAITING: not (sequence.block_table or sequence.host_table),
            }
            if not held.get(sequence.status) or sequence not in self._queue(sequence):
                raise RuntimeError(f"{sequence!r}: host blocks {sequence.host_table}")
        spare = sum(s.spare_slots for s in self.running)
        if spare != self._num_spare_slots:
            raise RuntimeError(f"{self._num_spare_slots} spare slots, but expected {spare}")

    def _queue(self, sequence: Sequence) -> SequenceQueue:
        if sequence.status is SequenceStatus.RUNNING:
            return self.running
        return self.swapped if sequence.status is SequenceStatus.SWAPPED else self.waiting

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        self.running.add(sequence)
        self._num_spare_slots += sequence.spare_slots

    def _leave(self, sequence: Sequence) -> None:
        self._queue(sequence).remove(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self._num_spare_slots -= sequence.spare_slots
        if sequence.block_table:
            self.pool.release(sequence.block_table)
            sequence.block_table = []
        if sequence.host_table:
            self.host.release(sequence.host_table)
            sequence.host_table = []


def distinct_blocks(tables: Iterable[SequenceOf[int]]) -> int:
    """Return how many blocks the tables hold, shared ones counted once."""
    return len({block for table in tables for block in table})
