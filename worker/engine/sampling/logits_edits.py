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
    """The only tokens that `rows` [M] may take, as bits [M, bytes], lowest bit first.

    There are bits for the whole vocabulary, and perhaps some more.
    """

    rows: NDArray[np.int64]
    bits: NDArray[np.uint8]

    def apply(self, logits: Tensor) -> None:
        """Set all other tokens' logits to minus infinity."""
        is_banned = self._banned(logits.device, logits.shape[1])
        if self.rows.size == len(logits) and (self.rows == np.arange(self.rows.size)).all():
            logits.masked_fill_(is_banned, -torch.inf)
        elif logits.device.type == "cpu":
            # Row by row in place is quicker than to gather the rows and to scatter them.
            for row, banned in zip(self.rows.tolist(), is_banned, strict=True):
                logits[row].masked_fill_(banned, -torch.inf)
        else:
            rows = _on(logits.device, self.rows)
            logits[rows] = logits[rows].masked_fill_(is_banned, -torch.inf)

    def _banned(self, device: torch.device, vocab_size: int) -> Tensor:
        """Return [M, vocabulary], true for tokens that are not allowed."""
        banned = ~self.bits
        if device.type == "cpu":
            columns = np.unpackbits(banned, axis=1, count=vocab_size, bitorder="little")
            return torch.from_numpy(columns).view(torch.bool)
        bits = _on(device, banned)
        places = torch.arange(8, dtype=torch.uint8, device=device)
        unpacked = (bits[:, :, None] >> places).bitwise_and_(1).flatten(1)
        return unpacked[:, :vocab_size].bool()


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
