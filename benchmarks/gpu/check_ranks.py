"""Section: what the ranks of a divided model do together, as far as one GPU can show it.

NCCL takes one rank on each GPU: the group here has one, so that the calls, their streams and the
giving up run, and every result is what was put in. With several GPUs two ranks and more are run by
`inferq worker --tensor-parallel-size`, whose log then speaks of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch.distributed import HashStore

from gpu.records import Quantity, Record, Target
from gpu.section import Case, Settings, each
from inferq.worker.model.ranks.parallel_group import RankGroup, VocabularyPart

_SIZES = {"rows": 257, "columns": 96}


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases: one group for all of them, which the last gives up."""
    group = RankGroup(0, 1, settings.device)
    yield each("connecting", lambda: _connect(group))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        name = f"collectives, {str(dtype).removeprefix('torch.')}"
        yield each(name, partial(_collectives, name, group, settings, dtype))
    yield each("embedding and logits", lambda: _vocabulary(group, settings))
    yield each("giving up", lambda: _give_up(group, settings))


def _record(name: str, different: float) -> Record:
    return Record(
        name, {"different": Quantity(float(different), "values")}, Target("different", at_most=0.0)
    )


def _connect(group: RankGroup) -> Record:
    group.connect(HashStore())
    return _record("connecting", 0)


def _collectives(name: str, group: RankGroup, settings: Settings, dtype: torch.dtype) -> Record:
    x = torch.randint(-99, 99, tuple(_SIZES.values()), device=settings.device).to(dtype)
    expected = x.clone()
    group.add_up(x)
    group.broadcast(x)
    joined = group.join(x.T)  # not contiguous, as slices of logits are not
    return _record(name, int((x != expected).sum() + (joined != expected.T).sum()))


def _vocabulary(group: RankGroup, settings: Settings) -> Record:
    rows, columns = _SIZES["rows"], _SIZES["columns"]
    table = torch.randn(rows + 7, columns, device=settings.device)
    part = VocabularyPart(group, first=0, rows=rows + 7, vocab_size=columns - 6)
    tokens = torch.arange(rows, device=settings.device).flip(0)
    embedded = part.embed(tokens, lambda indices: table[indices])
    logits = part.join(table)
    different = (embedded != table[tokens]).sum() + (logits != table[:, : columns - 6]).sum()
    return _record("embedding and logits", int(different))


def _give_up(group: RankGroup, settings: Settings) -> Record:
    group.abort()
    try:
        group.add_up(torch.ones(1, device=settings.device))
    except RuntimeError:
        return _record("giving up", 0)
    return _record("giving up", 1)
