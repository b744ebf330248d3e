"""One output on its way to the reader: tokens become text, and text and tokens become events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferq.protocol.messages import Event, FinishReason, Terminal, TokenLogprob
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.stop import StopMatcher
from inferq.worker.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextStep:
    """What some tokens did to the text: one released piece for each accepted token.

    Tokens after the one in which the stop string `stop` completed are not accepted.
    """

    pieces: tuple[str, ...]
    stop: str | None = None

    @property
    def num_accepted(self) -> int:
        """How many of the tokens belong to the output."""
        return len(self.pieces)


class OutputText:
    """The text of one output, ended by its stop strings.

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
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
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


class OutputEvents:
    """Gathers the tokens of one output until an event is taken.

    Any number of `add` may come before a `take`: a slow publisher gets fewer, larger events.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, index: int = 0) -> None:
        self._text = OutputText(tokenizer, params)
        self._index = index
        self._offset = 0
        self._token_ids: list[int] = []
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._tail = ""
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._has_end_to_tell = False

    @property
    def num_tokens(self) -> int:
        """Tokens of this output, published or not."""
        return self._text.num_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """How the output ended, or None while it goes on."""
        return self._finish_reason

    @property
    def stopped_by_text(self) -> bool:
        """Whether a stop string ended the output, which the engine cannot see."""
        return self._text.stop is not None

    def replay(self, token_ids: Sequence[int]) -> None:
        """Take tokens that were published before: they rebuild the state and go into no event."""
        self._text.append(token_ids)
        self._offset = len(token_ids)

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None = None,
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: int | None = None,
    ) -> None:
        """Take new tokens, and how the engine says the output ended.

        Tokens after a stop string are dropped, with their logprobs, and the stop string becomes
        the stop reason. Nothing can be added to an output that has ended.
        """
        if self._finish_reason is not None:
            return
        ends_on_token = finish_reason is FinishReason.STOP
        step = self._text.append(token_ids, ends_on_token=ends_on_token)
        self._token_ids.extend(token_ids[: step.num_accepted])
        self._pieces.extend(step.pieces)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.extend(logprobs[: step.num_accepted])
        if finish_reason is not None or step.stop is not None:
            self._end(finish_reason, stop_reason)

    def take(self, terminal: Terminal | None = None) -> Event | None:
        """Return the event of all that came since the last one, or None if nothing did."""
        if not (self._token_ids or self._has_end_to_tell or terminal is not None):
            return None
        ends = []
        end = 0
        for piece in self._pieces:
            end += len(piece)
            ends.append(end)
        event = Event(
            index=self._index,
            offset=self._offset,
            token_ids=tuple(self._token_ids),
            text="".join(self._pieces) + self._tail,
            text_ends=tuple(ends),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            finish_reason=self._finish_reason if self._has_end_to_tell else None,
            stop_reason=self._stop_reason if self._has_end_to_tell else None,
            terminal=terminal,
        )
        self._offset += len(self._token_ids)
        self._token_ids, self._pieces, self._tail = [], [], ""
        self._logprobs = None if self._logprobs is None else []
        self._has_end_to_tell = False
        return event

    def _end(self, finish_reason: FinishReason | None, stop_reason: int | None) -> None:
        self._tail = self._text.finish()
        self._finish_reason, self._stop_reason = finish_reason, stop_reason
        if self._text.stop is not None:
            self._finish_reason, self._stop_reason = FinishReason.STOP, self._text.stop
        self._has_end_to_tell = True
