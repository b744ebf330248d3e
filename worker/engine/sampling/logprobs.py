"""Log-probabilities of the raw logits, for what requests ask about; bounded in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferq.protocol.messages import TokenLogprob
from inferq.worker.engine.sampling.ranking import most_likely
from inferq.worker.engine.scheduling.plan import BeamCandidates

#: Rows taken together: [64, 128 K] in float32 are 32 MiB.
ROWS_AT_ONCE: Final = 64


def token_logprobs(
    logits: Tensor, rows: Tensor, tokens: Tensor, counts: NDArray[np.int64]
) -> list[TokenLogprob]:
    """Report tokens [N] under rows [N] of float32 logits, with the `counts` [N] most likely ones.

    A count may be the size of the vocabulary. A row's report does not depend on the others.
    """
    reports: list[TokenLogprob] = []
    for part in _parts(len(counts)):
        logprobs = logits[rows[part]].log_softmax(dim=1)
        chosen = logprobs.gather(1, tokens[part, None])[:, 0].tolist()
        tops = _tops(logprobs, counts[part])
        reports += map(TokenLogprob, chosen, tops)
    return reports


def beam_candidates(
    logits: Tensor, totals: Tensor, rows: Tensor, counts: list[int]
) -> list[BeamCandidates]:
    """Return the likeliest next tokens, `counts` [N] of them, of each of rows [N]; ties by id.

    `totals` [N] are the log-sum-exps of the rows' raw logits, `logits` the edited ones: as in
    transformers, an edit takes nothing from and gives nothing to the other tokens. There are fewer
    where fewer tokens are allowed: those at minus infinity are left out.
    """
    found: list[BeamCandidates] = []
    for part in _parts(len(counts)):
        scores = logits[rows[part]] - totals[part, None]
        best, ids = most_likely(scores, max(counts[part]))
        allowed = best.isfinite().sum(dim=1).tolist()
        for count, left, values, tokens in zip(
            counts[part], allowed, best.tolist(), ids.tolist(), strict=True
        ):
            kept = min(count, left)
            found.append(BeamCandidates(tuple(tokens[:kept]), tuple(values[:kept])))
    return found


def _tops(logprobs: Tensor, counts: NDArray[np.int64]) -> list[tuple[tuple[int, float], ...]]:
    """Rank only as far as each row asks: a whole vocabulary for one row is no cost for others."""
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(counts)
    is_whole = counts >= logprobs.shape[1]
    for group in (~is_whole & (counts > 0), is_whole):
        members = np.flatnonzero(group)
        if not members.size:
            continue
        index = torch.from_numpy(members).to(logprobs.device)
        best, ids = most_likely(logprobs[index], int(counts[members].max()))
        for row, count, values, tokens in zip(
            members.tolist(), counts[members].tolist(), best.tolist(), ids.tolist(), strict=True
        ):
            tops[row] = tuple(zip(tokens[:count], values[:count], strict=True))
    return tops


def _parts(size: int) -> Iterator[slice[Any, Any, Any]]:
    return (slice(first, first + ROWS_AT_ONCE) for first in range(0, size, ROWS_AT_ONCE))
