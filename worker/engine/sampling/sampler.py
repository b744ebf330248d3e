"""From logits to tokens, for the whole batch at once.

Order: the requests' edits of their logits, then greedy, or temperature, min_p, top_k, top_p and a
draw by Gumbel-max. A row's token depends on its logits, parameters and random key alone, never on
the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferq.kernels.gumbel import gumbel_noise
from inferq.kernels.sampling import probability_mass, sample_tokens
from inferq.protocol.messages import TokenLogprob
from inferq.worker.engine.sampling.host_copy import HostCopy
from inferq.worker.engine.sampling.logits_edits import LogitsEdits
from inferq.worker.engine.sampling.logprobs import beam_candidates, token_logprobs
from inferq.worker.engine.sampling.packed_copy import PackedCopy
from inferq.worker.engine.sampling.ranking import most_likely
from inferq.worker.engine.scheduling.plan import BeamCandidates

#: Candidates that are ranked where top_p alone limits them: nearly always enough for its mass.
_TOP_P_CANDIDATES: Final = 512
#: Above this top_k a row is sampled from its whole ranking.
_MAX_CANDIDATES: Final = 2048
#: Rows drawn together where many outputs are drawn from one row of logits: bounds the memory.
_DRAWS_AT_ONCE: Final = 256
#: What the device's sampling takes of a batch, in its order.
_DRAW_COLUMNS: Final = ("temperature", "top_k", "top_p", "min_p", "seed", "child", "position")


class Unusable(Enum):
    """Why nothing can be sampled from a row of logits."""

    NOT_FINITE = "not finite"
    #: The edits leave no token.
    DEAD_END = "dead end"


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What the tokens to sample [S] ask for, as host columns; `position` counts prompt and output.

    They come from rows [R] of logits: one each, unless `sources` says otherwise.
    """

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
    """Most likely tokens to report, at most the vocabulary's size; -1 reports nothing."""
    is_ranked: NDArray[np.bool_]
    """Whether the token's own log-probability is wanted, whatever `num_logprobs`."""
    sources: NDArray[np.int64] | None = None
    """The row of logits of each, where some rows have several or none."""
    beams: tuple[tuple[int, int], ...] = ()
    """Rows of logits whose best candidates are wanted, and how many of them."""

    def with_children(self, children: SequenceOf[tuple[int, ...]]) -> SamplingBatch:
        """Return the batch that samples a token for each of the children [R] of each row."""
        sources = np.arange(len(children)).repeat([len(each) for each in children])
        columns = {name: getattr(self, name)[sources] for name in _COLUMNS if name != "child"}
        child = np.array([index for each in children for index in each], dtype=np.int64)
        return SamplingBatch(**columns, child=child, sources=sources, beams=self.beams)


#: Those with an entry for each token to sample.
_COLUMNS: Final = tuple(f.name for f in fields(SamplingBatch) if f.name not in ("sources", "beams"))


@dataclass(frozen=True, slots=True)
class Samples:
    """The sampled tokens [S], and what was asked about them."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    """From the raw logits; with no alternatives where only the token's own is wanted."""
    candidates: list[BeamCandidates]
    """Of the beam rows, in their order."""
    unusable_rows: dict[int, Unusable]
    """Rows of logits without a usable maximum, and why; their tokens mean nothing."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Tokens that were sampled on the device, while the host may do something else."""

    tokens: Tensor
    """int64 [S] on the device, for the next step."""
    found: HostCopy
    """int64: the tokens, and from `finite_from` on, for each row of logits [R], whether its highest
    is finite."""
    finite_from: int
    logprobs: list[TokenLogprob | None]
    candidates: list[BeamCandidates]
    edited_highest: Tensor | None = None
    """The highest of each row [R], where rows were edited."""

    def finish(self) -> Samples:
        """Wait for the tokens."""
        found = self.found.get().tolist()
        unusable = [row for row, finite in enumerate(found[self.finite_from :]) if not finite]
        return Samples(
            token_ids=found[: len(self.logprobs)],
            logprobs=self.logprobs,
            candidates=self.candidates,
            unusable_rows=_reasons(unusable, self.edited_highest),
        )


class Sampler:
    """Samples rows of logits over a vocabulary that may be padded beyond `vocab_size`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._copy: PackedCopy | None = None

    def sample(
        self, logits: Tensor, batch: SamplingBatch, edits: LogitsEdits | None = None
    ) -> Samples:
        """Sample from rows of logits [R, padded vocabulary], which may be overwritten."""
        return self.start(logits, batch, edits).finish()

    def start(
        self, logits: Tensor, batch: SamplingBatch, edits: LogitsEdits | None = None
    ) -> Sampling:
        """Begin what `sample` does; on a GPU only what is asked beyond tokens is waited for."""
        raw = logits = logits[:, : self._vocab_size].float()
        wanted = np.flatnonzero((batch.num_logprobs >= 0) | batch.is_ranked)
        beam_rows = beam_totals = None
        if batch.beams:
            beam_rows = torch.tensor([row for row, _ in batch.beams], device=logits.device)
            beam_totals = logits[beam_rows].logsumexp(dim=1)
        if edits is not None:
            if wanted.size:
                raw = logits.clone()
            edits.apply(logits)
        sources = None if batch.sources is None else _on(logits.device, batch.sources)
        if logits.device.type == "cuda":
            tokens, highest = self.sample_on_device(logits, batch, sources)
        else:
            tokens, highest = _sample_on_host(logits, batch, sources)
        logprobs: list[TokenLogprob | None] = [None] * tokens.numel()
        if wanted.size:
            index = _on(logits.device, wanted)
            rows = index if sources is None else sources[index]
            counts = np.maximum(batch.num_logprobs[wanted], 0)
            reports = token_logprobs(raw, rows, tokens[index], counts)
            for place, report in zip(wanted.tolist(), reports, strict=True):
                logprobs[place] = report
        candidates: list[BeamCandidates] = []
        if beam_rows is not None and beam_totals is not None:
            wanted_counts = [count for _, count in batch.beams]
            candidates = beam_candidates(logits, beam_totals, beam_rows, wanted_counts)
        return Sampling(
            tokens=tokens,
            found=HostCopy(torch.cat((tokens, highest.isfinite().long()))),  # one transfer for both
            finite_from=len(logprobs),
            logprobs=logprobs,
            candidates=candidates,
            edited_highest=None if edits is None else highest,
        )

    def sample_on_device(
        self, logits: Tensor, batch: SamplingBatch, sources: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens [S] and each row's highest logit [R], without waiting for the device.

        The tokens are those that the CPU's form samples from the same logits.
        """
        if self._copy is None:
            self._copy = PackedCopy(logits.device)
        columns = self._copy.send([getattr(batch, name) for name in _DRAW_COLUMNS])
        sampled = sample_tokens(
            logits,
            **dict(zip(_DRAW_COLUMNS, columns, strict=True)),
            vocab_size=self._vocab_size,
            sources=sources,
            with_draws=bool((batch.temperature > 0).any()),
            with_top_k=bool((batch.top_k > 0).any()),
            with_top_p=bool((batch.top_p < 1).any()),
        )
        highest = sampled.highest if sources is None else logits.amax(dim=1)
        return sampled.token_ids, highest


def _sample_on_host(
    logits: Tensor, batch: SamplingBatch, sources: Tensor | None
) -> tuple[Tensor, Tensor]:
    # max gives the lowest index among equals, and NaN wherever there is one.
    highest, tokens = logits.max(dim=1)
    if sources is not None:
        tokens = tokens[sources]
    _draw_tokens(tokens, logits, highest, batch, sources)
    return tokens, highest


def _reasons(rows: list[int], edited_highest: Tensor | None) -> dict[int, Unusable]:
    """Tell rows that are broken from those that their edits left without a token."""
    if not rows or edited_highest is None:
        return dict.fromkeys(rows, Unusable.NOT_FINITE)
    values = edited_highest.tolist()
    return {
        row: Unusable.DEAD_END if values[row] == -math.inf else Unusable.NOT_FINITE for row in rows
    }


def _draw_tokens(
    tokens: Tensor, logits: Tensor, highest: Tensor, batch: SamplingBatch, sources: Tensor | None
) -> None:
    """Replace the greedy `tokens` [S] of those that are drawn."""
    drawn = np.flatnonzero(batch.temperature > 0)
    # Rows of their own are bounded as they are.
    at_once = _DRAWS_AT_ONCE if sources is not None else max(1, drawn.size)
    for first in range(0, drawn.size, at_once):
        part = drawn[first : first + at_once]
        index = _on(logits.device, part)
        rows = index if sources is None else sources[index]
        below_highest = logits[rows] - highest[rows, None]
        tokens[index] = _draw(below_highest, _Draw.of(batch, part, index))


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
    # In integers, so that no order of additions matters: the CUDA kernel draws the same tokens.
    weights = probability_mass(best).mul_(kept)
    # top_p is a share of what min_p and top_k keep: without top_k, of the whole row.
    has_top_k = draw.top_k > 0
    total = weights.sum(dim=1)
    if not bool(has_top_k.all()):
        row_totals = probability_mass(scores).mul_(scores >= least).sum(dim=1)
        total = torch.where(has_top_k, total, row_totals)
    before = weights.cumsum(dim=1) - weights
    limit = (draw.top_p.double() * total.double()).ceil().long()
    kept &= (before < limit[:, None]) | (draw.top_p >= 1)[:, None]
    is_done = torch.where(has_top_k, draw.top_k <= count, ~kept[:, -1])
    width = max(1, int(kept.sum(dim=1).max()))
    best, ids, kept = best[:, :width], ids[:, :width], kept[:, :width]
    noisy = (best + draw.noise(ids, scores.shape[1])).masked_fill_(~kept, -torch.inf)
    return ids.gather(1, noisy.argmax(dim=1, keepdim=True))[:, 0], is_done


def _top_k(draw: _Draw) -> Tensor:
    return torch.where(draw.top_k > 0, draw.top_k, torch.iinfo(torch.int64).max)


def _on(device: torch.device, column: NDArray[Any]) -> Tensor:
    return torch.from_numpy(column).to(device, non_blocking=True)
