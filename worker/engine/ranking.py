"""The most likely tokens of each row, in one order whatever the batch: ties by lowest id."""

from __future__ import annotations

import torch
from torch import Tensor


def most_likely(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` highest scores of each row [N, V], and their ids, both [N, count].

    Highest first; equal scores by ascending id, also where `count` cuts through equals, for which
    `torch.topk` promises nothing.
    """
    size = scores.shape[1]
    if count >= size:
        best, ids = scores.sort(dim=1, descending=True, stable=True)
        return best, ids
    best, ids = scores.topk(count + 1, dim=1)
    # Only these few are sorted; the one beyond the cut shows whether the cut is between equals.
    ids, by_id = ids.sort(dim=1)
    best, by_score = best.gather(1, by_id).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, by_score)
    cuts_equals = best[:, count - 1] == best[:, count]
    best, ids = best[:, :count], ids[:, :count]
    if bool(cuts_equals.any()):
        rows = torch.nonzero(cuts_equals).flatten()
        all_best, all_ids = scores[rows].sort(dim=1, descending=True, stable=True)
        best[rows], ids[rows] = all_best[:, :count], all_ids[:, :count]
    return best, ids
