"""Ragged batches over a paged cache, on the device that is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.functional import pad

from inferq.kernels.attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention: query heads, KV heads and their size."""

    query: int = 32
    kv: int = 8
    dim: int = 128


#: Llama-3-8B's.
LLAMA = Heads()


def batch_of(
    sequences: Sequence[tuple[int, int]],
    block_tables: Tensor,
    block_size: int,
    bound: int | None = None,
) -> AttentionBatch:
    """Describe sequences of (context, new) tokens whose blocks [S, blocks] are given.

    (-1, 1) is a padding row; `bound` is the batch's `max_seq_len`. All lies where the tables lie.
    """
    if bound is not None:
        block_tables = pad(block_tables, (0, -(-bound // block_size) - block_tables.shape[1]))
    device = block_tables.device
    host_tables = block_tables.cpu().long()
    news = [new for _, new in sequences]
    totals = [context + new for context, new in sequences]
    slots = []
    for index, (context, new) in enumerate(sequences):
        if totals[index] <= 0:
            slots.append(torch.full((new,), -1))
            continue
        positions = torch.arange(context, totals[index])
        blocks = host_tables[index, positions // block_size]
        slots.append(blocks * block_size + positions % block_size)
    return AttentionBatch(
        query_starts=torch.tensor([0, *news]).cumsum(0).to(device, torch.int32),
        seq_lens=torch.tensor(totals).to(device, torch.int32),
        block_tables=block_tables.int(),
        slot_mapping=torch.cat(slots).to(device, torch.int64),
        num_decodes=len(list(takewhile(lambda new: new == 1, news))),
        query_lens=tuple(news),
        context_lens=tuple(context for context, _ in sequences),
        block_size=block_size,
        max_seq_len=bound,
    )


def shuffled_tables(
    sequences: Sequence[tuple[int, int]], block_size: int, device: torch.device
) -> tuple[Tensor, int]:
    """Give block tables [S, blocks] over a shuffled pool, and the pool's size.

    Blocks past a sequence's end repeat one that belongs to nobody.
    """
    pages = [-(-max(context + new, 0) // block_size) for context, new in sequences]
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randperm(sum(pages) + 1, generator=generator)
    tables = torch.full((len(sequences), max([*pages, 1])), int(blocks[-1]))
    first = 0
    for row, count in zip(tables, pages, strict=True):
        row[:count] = blocks[first : first + count]
        first += count
    return tables.to(device, torch.int32), len(blocks)
