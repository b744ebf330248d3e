"""What some requests change in their logits before a token is chosen, for the whole batch at once.

Order: allowed tokens, banned tokens, biases, penalties. Rows that nobody names stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenPairs:
    """Pairs [N] of a row and a token, each at most once, with a value for each."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The only tokens that `rows` [M] may take, as bits [M, bytes], lowest bit first."""

    rows: NDArray[np.int64]
    bits: NDArray[np.uint8]

    def apply(self, logits: Tensor) -> None:
        """Set all other tokens' logits to minus infinity."""
        rows, bits = _on(logits.device, self.rows), _on(logits.device, self.bits)
        places = torch.arange(8, dtype=torch.uint8, device=logits.device)
        is_allowed = (bits[:, :, None] >> places).bitwise_and_(1).flatten(1).bool()
        missing = logits.shape[1] - is_allowed.shape[1]
        if missing > 0:
            is_allowed = torch.nn.functional.pad(is_allowed, (0, missing))
        logits[rows] = logits[rows].masked_fill_(~is_allowed[:, : logits.shape[1]], -torch.inf)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of rows [P], and the tokens that they meet as pairs [N].

    `owners` [N] index into the rows; `counts` [N] say how often the token stands in the output: 0
    for one that stands in the prompt only, which just the repetition penalty meets.
    """

    rows: NDArray[np.int64]
    repetition: NDArray[np.float32]
    presence: NDArray[np.float32]
    frequency: NDArray[np.float32]
    owners: NDArray[np.int64]
    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]

    def apply(self, logits: Tensor) -> None:
        """Penalize as transformers (repetition) and OpenAI (presence, frequency) define it."""
        device = logits.device
        owners, tokens = _on(device, self.owners), _on(device, self.tokens)
        rows = _on(device, self.rows)[owners]
        counts = _on(device, self.counts)
        repetition, presence, frequency = (
            _on(device, column)[owners]
            for column in (self.repetition, self.presence, self.frequency)
        )
        values = logits[rows, tokens]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * counts
        values -= presence * (counts > 0)
        logits[rows, tokens] = values


@dataclass(frozen=True, slots=True)
class LogitsEdits:
    """All changes of one step; None or no pairs where nobody asks."""

    allowed: AllowedTokens | None
    banned_rows: NDArray[np.int64]
    banned_tokens: NDArray[np.int64]
    """Pairs of row and token that must not be sampled."""
    biases: TokenPairs | None = None
    penalties: Penalties | None = None

    def apply(self, logits: Tensor) -> None:
        """Change logits [R, vocabulary], float32, in place."""
        device = logits.device
        if self.allowed is not None:
            self.allowed.apply(logits)
        if self.banned_rows.size:
            rows, tokens = _on(device, self.banned_rows), _on(device, self.banned_tokens)
            logits[rows, tokens] = -torch.inf
        if self.biases is not None:
            rows, tokens = _on(device, self.biases.rows), _on(device, self.biases.tokens)
            logits[rows, tokens] += _on(device, self.biases.values)
        if self.penalties is not None:
            self.penalties.apply(logits)


def _on(device: torch.device, column: NDArray[Any]) -> Tensor:
    return torch.from_numpy(column).to(device, non_blocking=True)
