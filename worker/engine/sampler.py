"""From logits to tokens, for the whole batch at once.

Order: banned tokens, then greedy, or temperature, min_p, top_k, top_p and a draw by Gumbel-max. A
row's token depends on its logits, parameters and random key alone, never on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferq.kernels.gumbel import gumbel_noise
from inferq.protocol.messages import TokenLogprob
from inferq.worker.engine.ranking import most_likely

#: Candidates that are ranked where top_p alone limits them: nearly always enough for its mass.
_TOP_P_CANDIDATES: Final = 512
#: Above this top_k a row is sampled from its whole ranking.
_MAX_CANDIDATES: Final = 2048


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the sampled rows [R] ask for, as host columns; `position` counts prompt and output."""

    temperature: NDArray[np.float32]
    """0 is greedy."""
    top_k: NDArray[np.int64]
    """0 keeps all."""
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.int64]
    child: NDArray[np.int64]
    position: NDArray[np.int64]
    """Index of the token to be sampled within prompt and output."""
    num_logprobs: NDArray[np.int64]
    """Most likely tokens to report; -1 reports nothing, not even the chosen one."""
    banned_rows: NDArray[np.int64]
    banned_tokens: NDArray[np.int64]
    """Pairs of row and token that must not be sampled."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The sampled tokens [R], and what was asked about them."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    non_finite_rows: list[int]
    """Rows whose logits hold no usable maximum; their tokens mean nothing."""


class Sampler:
    """Samples rows of logits over a vocabulary that may be padded beyond `vocab_size`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Samples:
        """Sample each row of logits [R, padded vocabulary], which may be overwritten."""
        logits = logits[:, : self._vocab_size].float()
        logprobs = _RawLogprobs.of(logits, batch) if (batch.num_logprobs >= 0).any() else None
        if batch.banned_rows.size:
            rows = _on(logits.device, batch.banned_rows)
            logits[rows, _on(logits.device, batch.banned_tokens)] = -torch.inf
        # max gives the lowest index among equals, and NaN wherever there is one.
        highest, tokens = logits.max(dim=1)
        drawn = np.flatnonzero(batch.temperature > 0)
        if drawn.size:
            rows = _on(logits.device, drawn)
            tokens[rows] = _draw(logits[rows] - highest[rows, None], _Draw.of(batch, drawn, rows))
        found, finite = torch.stack((tokens, highest.isfinite().long())).tolist()
        return Samples(
            token_ids=found,
            logprobs=[None] * len(found) if logprobs is None else logprobs.report(tokens),
            non_finite_rows=[row for row, is_finite in enumerate(finite) if not is_finite],
        )


@dataclass(frozen=True, slots=True)
class _Draw:
    """The drawn rows' parameters as columns [N] on the logits' device."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    child: Tensor
    position: Tensor

    @classmethod
    def of(cls, batch: SamplingBatch, drawn: NDArray[np.int64], rows: Tensor) -> _Draw:
        return cls(
            *(_on(rows.device, getattr(batch, name)[drawn]) for name in cls.__dataclass_fields__)
        )

    def rows(self, index: Tensor) -> _Draw:
        return _Draw(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def noise(self, token_ids: Tensor | None, vocab_size: int) -> Tensor:
        keys = (self.seed, self.child, self.position)
        if token_ids is None:
            return gumbel_noise(*keys, vocab_size=vocab_size)
        return gumbel_noise(*keys, token_ids)


def _draw(below_highest: Tensor, draw: _Draw) -> Tensor:
    """Draw a token for each row of logits [N, V] that were shifted so that the highest is 0."""
    scores = below_highest.div_(draw.temperature[:, None])
    limited = (draw.top_k > 0) | (draw.top_p < 1)
    tokens = torch.empty_like(draw.top_k)
    for is_limited, sample in ((False, _draw_from_all), (True, _draw_from_best)):
        rows = torch.nonzero(limited == is_limited).flatten()
        if rows.numel() == tokens.numel():
            return sample(scores, draw)
        if rows.numel():
            tokens[rows] = sample(scores[rows], draw.rows(rows))
    return tokens


def _draw_from_all(scores: Tensor, draw: _Draw) -> Tensor:
    """Draw from whole rows, without ranking them; min_p may still drop tokens."""
    noisy = draw.noise(None, scores.shape[1]).add_(scores)
    noisy.masked_fill_(scores < draw.min_p.log()[:, None], -torch.inf)
    return noisy.argmax(dim=1)


def _draw_from_best(scores: Tensor, draw: _Draw) -> Tensor:
    """Draw from the most likely tokens; rows that may need more go again."""
    size = scores.shape[1]
    count = _num_candidates(draw, size)
    tokens, is_done = _draw_from_ranking(scores, draw, count)
    while count < size and not bool(is_done.all()):
        count = min(8 * count, size)
        rows = torch.nonzero(~is_done).flatten()
        tokens[rows], is_done[rows] = _draw_from_ranking(scores[rows], draw.rows(rows), count)
    return tokens


def _num_candidates(draw: _Draw, vocab_size: int) -> int:
    """Return how many tokens to rank: what the largest usual top_k asks, or enough for top_p."""
    is_usual = (draw.top_k > 0) & (draw.top_k <= _MAX_CANDIDATES)
    return min(int(torch.where(is_usual, draw.top_k, _TOP_P_CANDIDATES).max()), vocab_size)


def _draw_from_ranking(scores: Tensor, draw: _Draw, count: int) -> tuple[Tensor, Tensor]:
    """Draw from the best `count` tokens; also say in which rows no later token could count.

    min_p, top_k and top_p each keep a prefix of the ranking.
    """
    least = draw.min_p.log()[:, None]
    best, ids = most_likely(scores, count)
    kept = best >= least
    kept &= torch.arange(count, device=scores.device) < _top_k(draw)[:, None]
    weights = best.double().exp().mul_(kept)
    # top_p is a share of what min_p and top_k keep: without top_k, of the whole row.
    has_top_k = draw.top_k > 0
    total = weights.sum(dim=1)
    if not bool(has_top_k.all()):
        row_totals = scores.exp().mul_(scores >= least).sum(dim=1, dtype=torch.float64)
        total = torch.where(has_top_k, total, row_totals)
    before = weights.cumsum(dim=1) - weights
    kept &= before < (draw.top_p * total)[:, None]
    is_done = torch.where(has_top_k, draw.top_k <= count, ~kept[:, -1])
    width = max(1, int(kept.sum(dim=1).max()))
    best, ids, kept = best[:, :width], ids[:, :width], kept[:, :width]
    noisy = (best + draw.noise(ids, scores.shape[1])).masked_fill_(~kept, -torch.inf)
    return ids.gather(1, noisy.argmax(dim=1, keepdim=True))[:, 0], is_done


def _top_k(draw: _Draw) -> Tensor:
    return torch.where(draw.top_k > 0, draw.top_k, torch.iinfo(torch.int64).max)


@dataclass(frozen=True, slots=True)
class _RawLogprobs:
    """Log-probabilities before bans and temperature, of the rows that ask for them."""

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    #: log-softmax of these rows [N, V], and its highest entries with their ids [N, K].
    logprobs: Tensor
    best: Tensor
    ids: Tensor

    @classmethod
    def of(cls, logits: Tensor, batch: SamplingBatch) -> _RawLogprobs:
        rows = np.flatnonzero(batch.num_logprobs >= 0)
        counts = batch.num_logprobs[rows]
        logprobs = logits[_on(logits.device, rows)].log_softmax(dim=1)
        most = int(counts.max())
        best, ids = most_likely(logprobs, max(1, most))
        return cls(rows, counts, logprobs, best, ids)

    def report(self, tokens: Tensor) -> list[TokenLogprob | None]:
        """Return an entry for each row of the batch, given its sampled tokens [R]."""
        chosen = tokens[_on(tokens.device, self.rows), None]
        values = self.logprobs.gather(1, chosen)[:, 0].tolist()
        report: list[TokenLogprob | None] = [None] * tokens.numel()
        columns = (self.rows.tolist(), self.counts.tolist(), values)
        best, ids = self.best.tolist(), self.ids.tolist()
        for row, count, value, top, top_ids in zip(*columns, best, ids, strict=True):
            report[row] = TokenLogprob(value, tuple(zip(top_ids[:count], top[:count], strict=True)))
        return report


def _on(device: torch.device, column: NDArray[Any]) -> Tensor:
    return torch.from_numpy(column).to(device, non_blocking=True)
