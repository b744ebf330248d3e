"""The most likely tokens of each row, in one order whatever the batch: ties by lowest id."""

from __future__ import annotations

import torch
from torch import Tensor


def most_likely(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` highest scores of each row [N, V], and their ids, both [N, count].

    Highest first; equal scores by ascending id, also where `count` cuts through equals, for which
    `torch.topk` promises nothing.
    """
    if scores.device.type == "cuda":
        return most_likely_by_key(scores, count)
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


def most_likely_by_key(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Do the same for float32 scores without NaN, so that the host need not see where ties are.

    Twice the memory: each score and its id are one number, by which all differ.
    """
    size = scores.shape[1]
    # As integers, floats are in order but for the sign; adding 0 makes both zeros equal.
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    descending = torch.arange(size - 1, -1, -1, device=scores.device)
    keys = (ordered.long() << 32) | descending
    ids = size - 1 - (keys.topk(min(count, size), dim=1).values & 0xFFFFFFFF)
    return scores.gather(1, ids), ids
