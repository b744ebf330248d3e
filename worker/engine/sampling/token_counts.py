"""How often tokens stand in one growing output, kept from step to step for its penalties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferq.worker.engine.requests.sequence import Sequence


class TokenCounts:
    """The distinct tokens that penalties meet, and their counts in the output.

    With `counts_prompt`, tokens that stand in the prompt only are there too, with a count of 0.
    """

    __slots__ = ("_counted", "_counts", "_places", "_token_ids", "_tokens")

    def __init__(self, sequence: Sequence, *, counts_prompt: bool) -> None:
        self._token_ids = sequence.token_ids
        self._counted = sequence.num_prompt_tokens
        prompt = sequence.token_ids[: self._counted] if counts_prompt else []
        known = np.unique(np.array(prompt, dtype=np.int64))
        self._places = dict(zip(known.tolist(), range(known.size), strict=True))
        self._tokens = np.zeros(known.size + 64, dtype=np.int64)
        self._tokens[: known.size] = known
        self._counts = np.zeros_like(self._tokens)

    def is_of(self, sequence: Sequence) -> bool:
        """Whether this counts the list of tokens that the sequence has now."""
        return self._token_ids is sequence.token_ids

    def update(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count the tokens that are new; return all distinct tokens and their counts.

        Both are views that the next call changes.
        """
        for token in self._token_ids[self._counted :]:
            place = self._places.setdefault(token, len(self._places))
            if place == self._tokens.size:
                self._grow()
            self._tokens[place] = token
            self._counts[place] += 1
        self._counted = len(self._token_ids)
        size = len(self._places)
        return self._tokens[:size], self._counts[:size]

    def _grow(self) -> None:
        room = np.zeros_like(self._tokens)
        self._tokens = np.concatenate((self._tokens, room))
        self._counts = np.concatenate((self._counts, room))
