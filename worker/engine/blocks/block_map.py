"""A picture of the pools at one moment: what each block is, and which sequence is behind it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import chain

import numpy as np
import numpy.typing as npt

from inferq.protocol.snapshots import BlockSnapshot, BlockState, HoldingSequence, short_id
from inferq.worker.engine.blocks.residency import Residency
from inferq.worker.engine.requests.sequence import Sequence

_Array = npt.NDArray[np.int64]


def map_blocks(residency: Residency, *, shows_cached: bool) -> BlockSnapshot:
    """Return the map, between steps; linear in blocks and block tables.

    Without `shows_cached`, free blocks count as free whatever they hold.
    """
    pool, host = residency.pool, residency.host
    running = [s for s in residency.running if s.block_table]
    swapped = list(residency.swapped)
    holders, first = _holders([s.block_table for s in running], pool.num_blocks)
    states = np.minimum(holders, 2) + int(BlockState.CACHED)
    states[holders == 0] = BlockState.FREE
    if shows_cached:
        states[pool.cached_blocks()] = BlockState.CACHED
    host_holders, host_first = _holders([s.host_table for s in swapped], host.num_blocks)
    host_states = np.where(host_holders > 0, int(BlockState.SWAPPED), int(BlockState.FREE))
    host_first[host_holders > 0] += len(running)
    cells = np.stack(
        [
            np.concatenate([states, host_states]),
            np.concatenate([holders, host_holders]),
            np.concatenate([first, host_first]),
        ]
    )
    return BlockSnapshot(
        num_blocks=pool.num_blocks,
        num_host_blocks=host.num_blocks,
        runs=_runs(cells),
        sequences=[_holding(sequence) for sequence in chain(running, swapped)],
    )


def _holding(sequence: Sequence) -> HoldingSequence:
    return HoldingSequence(short_id(sequence.request_id), sequence.child_index, sequence.num_tokens)


def _holders(tables: SequenceOf[SequenceOf[int]], num_blocks: int) -> tuple[_Array, _Array]:
    """Return for each block how many of the tables have it, and the first that does, else 0."""
    lengths = [len(table) for table in tables]
    blocks = np.fromiter(chain.from_iterable(tables), np.int64, sum(lengths))
    first = np.zeros(num_blocks, np.int64)
    # the last write stays, so that the first table comes last
    first[blocks[::-1]] = np.repeat(np.arange(len(tables)), lengths)[::-1]
    return np.bincount(blocks, minlength=num_blocks), first


def _runs(cells: _Array) -> list[int]:
    """Return the columns as runs: how many are equal, and what they are."""
    num_cells = cells.shape[1]
    changes = np.flatnonzero((cells[:, 1:] != cells[:, :-1]).any(axis=0)) + 1
    starts = np.concatenate([np.zeros(min(1, num_cells), np.int64), changes])
    counts = np.diff(np.append(starts, num_cells))
    runs: list[int] = np.vstack([counts, cells[:, starts]]).T.ravel().tolist()
    return runs
