"""The outputs of one job as they grow, and the events that are made of them.

The id of an event in the result stream is a total: of the tokens of all outputs, up to its own.
So every event but the terminal one must bring tokens, and an output's end always travels with its
last token, or with the job's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final

from inferq.protocol.messages import Event, FinishReason, Terminal, TokenLogprob

#: Most tokens of one event.
MAX_EVENT_TOKENS: Final = 2048
#: Most log-probabilities of one event's tokens, of `LOGPROB_BYTES` each: with the bytes of a whole
#: vocabulary they stay below the protocol's limit. A single token may have more.
MAX_EVENT_LOGPROBS: Final = 2**17
#: Bytes of a log-probability in an event, of a token's text besides the text, of a token id.
LOGPROB_BYTES: Final = 15
TOKEN_TEXT_BYTES: Final = 8
TOKEN_ID_BYTES: Final = 5
#: Bytes of an event that its other parts may take.
EVENT_MARGIN: Final = 2**16


@dataclass(slots=True)
class OutputLog:
    """All tokens of one output since offset 0, each with its share of text and its logprobs."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    #: Text released at the end, after the last token's share.
    tail: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    #: Sum over the tokens, where it is known.
    cumulative_logprob: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the output has ended."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self.texts) + self.tail

    def event(self, index: int, start: int, stop: int) -> Event:
        """Return the event of tokens `start` to `stop`, with the output's end if these are all."""
        ends: list[int] = []
        length = 0
        for text in self.texts[start:stop]:
            length += len(text)
            ends.append(length)
        logprobs = [lp for lp in self.logprobs[start:stop] if lp is not None]
        ended = self.is_finished and stop == len(self.token_ids)
        return Event(
            index=index,
            offset=start,
            token_ids=tuple(self.token_ids[start:stop]),
            text="".join(self.texts[start:stop]) + (self.tail if ended else ""),
            text_ends=tuple(ends),
            logprobs=tuple(logprobs) if logprobs else None,
            finish_reason=self.finish_reason if ended else None,
            stop_reason=self.stop_reason if ended else None,
            cumulative_logprob=self.cumulative_logprob if ended else None,
        )


def _named_tokens(event: Event) -> set[int]:
    """Return the ids of the event's tokens, and of all that its log-probabilities speak of."""
    named = set(event.token_ids)
    for entry in event.logprobs or ():
        named.update(token_id for token_id, _ in entry.top)
    if event.prompt_logprobs is not None:
        named.update(event.prompt_token_ids or ())
        for known in event.prompt_logprobs:
            named.update(token_id for token_id, _ in (known.top if known else ()))
    return named


class JobLog:
    """The outputs of one job, and in which order their tokens are published.

    The next token is always that of the output with the fewest published, the lowest index first;
    those that have ended are passed by, and those that are ahead wait. So a total stands for the
    same tokens whichever worker counts, and whenever: one that goes on behind a server's lost tail
    sends what readers saw before, in the same order. Kept whole until the job ends, for the same
    reason.
    """

    __slots__ = (
        "_is_closed",
        "_order",
        "_published",
        "closing",
        "outputs",
        "prompt_logprobs",
        "prompt_token_ids",
        "token_bytes",
    )

    def __init__(self, num_outputs: int = 1) -> None:
        self.outputs = [OutputLog() for _ in range(num_outputs)]
        #: One entry for each prompt token, the first None; if asked for.
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        #: The prompt's token ids, if they go with the first event.
        self.prompt_token_ids: tuple[int, ...] | None = None
        #: Tells the bytes of a token, if the events have those of the tokens that they name.
        self.token_bytes: Callable[[int], bytes] | None = None
        #: The output whose end is the job's: it has the terminal event if no tokens are left.
        self.closing = 0
        #: The output that each token belongs to whose turn has come.
        self._order = bytearray()
        #: How many of those each output has.
        self._published = [0] * num_outputs
        self._is_closed = False

    @property
    def total(self) -> int:
        """Tokens whose turn has come; all, once the outputs have ended or the log is closed."""
        self._take_turns()
        return len(self._order)

    @property
    def finish_reason(self) -> FinishReason:
        """How the job ends whose outputs all ended by themselves: `length` if one of them did."""
        reasons = {output.finish_reason for output in self.outputs}
        return FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP

    def append(
        self, token_id: int, text: str, logprob: TokenLogprob | None, index: int = 0
    ) -> None:
        """Add one token to an output."""
        output = self.outputs[index]
        output.token_ids.append(token_id)
        output.texts.append(text)
        output.logprobs.append(logprob)

    def close(self) -> None:
        """Take it that no output gets any more tokens: the job ends early."""
        self._is_closed = True

    def replay(self, event: Event) -> None:
        """Add a published event, which must follow those added before it.

        Raises `ValueError` if it does not.
        """
        if event.index >= len(self.outputs):
            raise ValueError(f"there is no output {event.index}")
        output = self.outputs[event.index]
        if event.offset != len(output.token_ids) or output.is_finished:
            raise ValueError("the events do not follow each other")
        start = 0
        for position, (token_id, end) in enumerate(
            zip(event.token_ids, event.text_ends, strict=True)
        ):
            logprob = None if event.logprobs is None else event.logprobs[position]
            self.append(token_id, event.text[start:end], logprob, event.index)
            start = end
        output.tail = event.text[start:]
        output.finish_reason = event.finish_reason
        output.stop_reason = event.stop_reason
        output.cumulative_logprob = event.cumulative_logprob
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.prompt_token_ids is not None:
            self.prompt_token_ids = event.prompt_token_ids
        # Whoever published it, in whatever order: what is published is.
        self._order.extend([event.index] * len(event.token_ids))
        self._published[event.index] += len(event.token_ids)

    def best(self, indexes: Sequence[int]) -> JobLog:
        """Return a log of these outputs alone, numbered anew in this order."""
        chosen = JobLog(len(indexes))
        chosen.outputs = [self.outputs[index] for index in indexes]
        chosen.prompt_logprobs = self.prompt_logprobs
        chosen.prompt_token_ids = self.prompt_token_ids
        chosen.token_bytes = self.token_bytes
        for index, output in enumerate(chosen.outputs):
            chosen._order.extend([index] * len(output.token_ids))
            chosen._published[index] = len(output.token_ids)
        chosen.closing = max(len(indexes) - 1, 0)
        return chosen

    def events(self, after: int, terminal: Terminal | None) -> list[tuple[int, Event]]:
        """Return the events of all tokens after the first `after`, each with its total of tokens.

        With `terminal`, the last one ends the job.
        """
        return list(self.iter_events(after, terminal))

    def iter_events(self, after: int, terminal: Terminal | None) -> Iterator[tuple[int, Event]]:
        """Make the events that `events` returns one after the other, for who needs the first only.

        The log must not grow meanwhile.
        """
        if terminal is None:
            yield from self._token_events(after)
            return
        has_closing = False
        last: tuple[int, Event] | None = None
        for entry in self._token_events(after):
            if last is not None:
                yield last
            last = entry
            has_closing = has_closing or entry[1].index == self.closing
        if last is None or not has_closing:
            if last is not None:
                yield last
            # may bring the end of an output, and text, but no token
            closing = self.outputs[self.closing]
            end = len(closing.token_ids)
            last = max(self.total, after), closing.event(self.closing, end, end)
        yield last[0], replace(last[1], terminal=terminal)

    def _token_events(self, after: int) -> Iterator[tuple[int, Event]]:
        self._take_turns()
        unsent = self._order[after:]
        if len(unsent) == 1:  # at every step of almost every job
            [index] = unsent
            offset = self._published[index] - 1
            yield after + 1, self._complete(self.outputs[index].event(index, offset, offset + 1))
            return
        total = len(self._order) - len(unsent)
        offsets = [
            published - unsent.count(index) for index, published in enumerate(self._published)
        ]
        for index, run in groupby(unsent):
            output = self.outputs[index]
            left = sum(1 for _ in run)
            while left:
                start = offsets[index]
                has_prompt = index == start == 0 and self.prompt_logprobs is not None
                count = 1 if has_prompt else self._num_fitting(output, start, left)
                event = self._complete(output.event(index, start, start + count))
                offsets[index] += count
                total += count
                left -= count
                yield total, event

    def _complete(self, event: Event) -> Event:
        """Return the event, the first of output 0 with what is known of the prompt."""
        if event.index == event.offset == 0:
            event = replace(
                event,
                prompt_logprobs=self.prompt_logprobs,
                prompt_token_ids=self.prompt_token_ids,
            )
        if self.token_bytes is None:
            return event
        texts = {token_id: self.token_bytes(token_id) for token_id in _named_tokens(event)}
        return replace(event, token_texts=texts)

    def _take_turns(self) -> None:
        """Add the tokens whose turn has come to the order."""
        if len(self.outputs) == 1:
            arrived = len(self.outputs[0].token_ids)
            self._order.extend(bytes(arrived - self._published[0]))
            self._published[0] = arrived
            return
        while (index := self._next_output()) is not None:
            self._order.append(index)
            self._published[index] += 1

    def _next_output(self) -> int | None:
        """Return whose turn it is; None if that output's next token is not there yet."""
        published = self._published
        going_on = [
            index
            for index, output in enumerate(self.outputs)
            if published[index] < len(output.token_ids)
            or not (output.is_finished or self._is_closed)
        ]
        index = min(going_on, key=lambda index: (published[index], index), default=None)
        if index is None or published[index] == len(self.outputs[index].token_ids):
            return None
        return index

    @staticmethod
    def _num_fitting(output: OutputLog, start: int, most: int) -> int:
        """Return how many of the next `most` tokens one event may hold, at least one."""
        most = min(most, MAX_EVENT_TOKENS)
        room = MAX_EVENT_LOGPROBS
        for count in range(most):
            logprob = output.logprobs[start + count]
            if logprob is None:
                return most
            room -= 1 + len(logprob.top)
            if room < 0:
                return max(count, 1)
        return most
