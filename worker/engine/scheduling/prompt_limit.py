"""How many prompt tokens a step takes beside decodes, learned from how long steps take."""

from __future__ import annotations

from typing import Final

#: Never fewer: smaller steps cost more than they spare.
FEWEST_TOKENS: Final = 32
#: Weight of the newest step in the means: some ten steps count.
_NEWEST: Final = 0.1
#: Prompt tokens below which a step says little about their cost.
_TELLING_TOKENS: Final = 16


class PromptLimit:
    """Keeps prompts from delaying the running sequences by more than `delay_s` in a step.

    Begins with a measured speed, which a machine that is busy at the start makes too low, and
    follows the steps from then on: those without prompts tell what decodes cost by themselves, the
    others what a prompt token costs besides.
    """

    def __init__(self, delay_s: float, tokens_per_s: float, block_size: int) -> None:
        self._delay_s = delay_s
        self._block_size = block_size
        self._token_s = 1.0 / tokens_per_s
        #: A decode's share of a step without prompts; None before the first.
        self._decode_s: float | None = None

    @property
    def tokens(self) -> int:
        """The limit, in whole blocks."""
        tokens = int(self._delay_s / self._token_s + 1e-9)
        return max(FEWEST_TOKENS, tokens // self._block_size * self._block_size)

    def learn(self, *, num_decodes: int, num_tokens: int, seconds: float) -> None:
        """Take in a step: its sequences with one token, all its tokens, and how long it took."""
        prompt_tokens = num_tokens - num_decodes
        if prompt_tokens == 0:
            if num_decodes:
                self._decode_s = _mean(self._decode_s, seconds / num_decodes)
        elif prompt_tokens >= _TELLING_TOKENS:
            rest = seconds - num_decodes * (self._decode_s or 0.0)
            # Decodes share the weights that a prompt reads anyway: never less than a tenth.
            self._token_s = _mean(self._token_s, max(rest, seconds / 10) / prompt_tokens)


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST * (newest - before)
