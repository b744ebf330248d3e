"""One output on its way to the reader: tokens become text, which a stop string may end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferq.protocol.params import SamplingParams
from inferq.worker.engine.text.detokenizer import Detokenizer, NoText
from inferq.worker.engine.text.stop import StopMatcher
from inferq.worker.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextStep:
    """What some tokens did to the text: one released piece for each accepted token.

    Tokens after the one in which the stop string `stop` completed are not accepted.
    """

    text_pieces: tuple[str, ...]
    stop: str | None = None

    @property
    def num_accepted(self) -> int:
        """How many of the tokens belong to the output."""
        return len(self.text_pieces)


class OutputText:
    """The text of one output, ended by its stop strings; none at all without `detokenize`.

    Everything released is final: text that could yet become part of a stop string, or part of an
    unfinished character, is held back. The state depends on the tokens alone, however they were
    grouped into calls, so that replaying published tokens rebuilds it.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_includes_stop",
        "_matcher",
        "_min_tokens",
        "_num_tokens",
        "_stop",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = _detokenizer(tokenizer, params)
        stops = params.stop_strings
        self._matcher = StopMatcher(stops) if stops else None
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""
        self._stop: str | None = None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stop

    @property
    def num_tokens(self) -> int:
        """Tokens accepted so far."""
        return self._num_tokens

    def append(self, token_ids: Sequence[int], *, ends_on_token: bool = False) -> TextStep:
        """Take new tokens; with `ends_on_token` the last one is an end token.

        An end token shows in the text only with `include_stop_str_in_output`.
        """
        pieces: list[str] = []
        last = len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            if self._stop is not None:
                break
            self._num_tokens += 1
            is_end = ends_on_token and i == last and not self._includes_stop
            pieces.append("" if is_end else self._release(self._detokenizer.append(token_id)))
        return TextStep(tuple(pieces), self._stop)

    def finish(self) -> str:
        """Return what was held back; no tokens may follow. May set `stop`, never unsets it."""
        if self._stop is not None:
            return ""
        released = self._release(self._detokenizer.finish())
        held, self._held = self._held, ""
        return released + held

    def _release(self, text: str) -> str:
        """Take decoded text and return what may be shown of it, and of what was held back.

        A stop string counts when it completes in the text of a token after the first min_tokens.
        """
        if self._matcher is None or not text:
            return text
        match = self._matcher.feed(text, counts=self._num_tokens > self._min_tokens)
        pending = self._held + text
        if match is not None:
            self._stop, self._held = match.stop, ""
            num_cut = match.num_after if self._includes_stop else match.num_from_start
            return pending[: len(pending) - num_cut]
        num_shown = len(pending)
        if not self._includes_stop:
            num_shown -= self._matcher.num_held
        self._held = pending[num_shown:]
        return pending[:num_shown]


def _detokenizer(tokenizer: Tokenizer, params: SamplingParams) -> Detokenizer:
    if not params.detokenize:
        return NoText()
    return tokenizer.detokenizer(
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
