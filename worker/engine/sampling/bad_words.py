"""Texts that must not be generated, as token sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf


def word_tokens(words: Iterable[str], tokenize: Callable[[str], list[int]]) -> set[tuple[int, ...]]:
    """Return the token sequences of words, each with and without a space before it (as in vLLM)."""
    texts = {
        text
        for word in words
        for stripped in (word.lstrip(" "),)
        for text in ((stripped, " " + stripped) if stripped else (word,))
    }
    return {tuple(tokens) for text in texts if (tokens := tokenize(text))}


class BadWords:
    """Token sequences of which no output may hold one."""

    __slots__ = ("_longer", "single")

    def __init__(self, sequences: Iterable[tuple[int, ...]], vocab_size: int) -> None:
        #: Words of one token: never allowed.
        self.single: list[int] = []
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        for tokens in sorted(sequences):
            if max(tokens) >= vocab_size:
                continue
            if len(tokens) == 1:
                self.single.append(tokens[0])
            else:
                self._longer.setdefault(tokens[-2], []).append(tokens)

    def banned_after(self, token_ids: SequenceOf[int], start: int) -> list[int]:
        """Return the tokens that would complete a longer word in `token_ids[start:]`."""
        if len(token_ids) <= start:
            return []
        return [
            tokens[-1]
            for tokens in self._longer.get(token_ids[-1], ())
            if len(tokens) - 1 <= len(token_ids) - start
            and tuple(token_ids[1 - len(tokens) :]) == tokens[:-1]
        ]
