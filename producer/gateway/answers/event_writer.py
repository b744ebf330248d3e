"""The server-sent events of one response: a pure function of the events of its jobs.

An event's id says where each of the response's jobs stands, so that a client that comes back gets
what lies after: `<tokens>`, the job's tokens so far, and `<tokens>-<k>` for the k-th chunk since
then that brought no tokens (a role, an end, the usage). With several jobs it is a list with commas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from inferq.producer import StreamEvent
from inferq.producer.gateway.answers.choices import Delta, JobChoices
from inferq.producer.gateway.answers.chunks import ChunkEncoder
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.messages import Usage

#: A job's tokens so far, and how many chunks without tokens came since.
Place = tuple[int, int]

START: Final[Place] = (0, 0)
DONE: Final = b"data: [DONE]\n\n"
#: Bytes from which on no more are put into one piece.
PIECE_BYTES: Final = 2**16
KEEP_ALIVE: Final = b": keep-alive\n\n"

_PLACE: Final = re.compile(r"(0|[1-9]\d{0,11})(?:-([1-9]\d{0,5}))?", re.ASCII)
_FIELD: Final = "Last-Event-ID"


def parse_places(event_id: str, number: int) -> list[Place]:
    """Return the places of an event's id, of so many jobs; raise `InvalidRequestError` for none."""
    parts = event_id.split(",") if len(event_id) <= number * 20 else ()
    matches = [_PLACE.fullmatch(part.strip()) for part in parts]
    places = [(int(m[1]), int(m[2] or 0)) for m in matches if m is not None]
    if len(places) != len(parts) or len(parts) != number:
        form = "the id of an event of this stream" if number > 1 else "a number of tokens from 0 on"
        raise InvalidRequestError(f"{event_id[:80]!r} is not {form}", field=_FIELD)
    return places


def format_place(place: Place) -> bytes:
    """Return a place as it is written in an event's id."""
    tokens, chunks = place
    return b"%d-%d" % place if chunks else b"%d" % tokens


class EventWriter:
    """Writes the events of a response's jobs as they come; leaves out what lies before `seen`.

    Raises `InvalidRequestError` as soon as it is certain that no event has such an id.
    """

    def __init__(
        self,
        jobs: Sequence[JobChoices],
        encoder: ChunkEncoder,
        seen: Sequence[Place] | None = None,
    ) -> None:
        self._jobs = jobs
        self._encoder = encoder
        self._seen = [START] * len(jobs) if seen is None else list(seen)
        self._places = [START] * len(jobs)
        self._is_open = [False] * len(jobs)
        self._ids = [format_place(place) for place in self._seen]
        self._include_usage = jobs[0].note.include_usage

    def feed(self, job: int, event: StreamEvent) -> bytes:
        """Return what an event of one job brings: no chunk, one, or some."""
        choices = self._jobs[job]
        written = b""
        if not self._is_open[job]:
            self._is_open[job] = True
            for opening in choices.opening(event):
                written += self._next(job, self._encoder.opening, opening)
        delta = choices.feed(event)
        if event.token_ids:
            tokens, chunk = self._seen[job]
            if chunk and tokens < event.next_offset:
                self._check_seen(job)
            self._places[job] = (event.next_offset, 0)
            if delta.has_content and self._places[job] > self._seen[job]:
                written += self._frame(job, self._encoder.content(delta))
        elif delta.has_content:
            written += self._next(job, self._encoder.content, delta)
        if delta.finish_reason is not None:
            written += self._next(job, self._encoder.end, delta)
        return written

    def feed_all(self, job: int, events: Iterable[StreamEvent]) -> Iterator[bytes]:
        """Yield what events of one job bring, together where that is not too much.

        An error comes after what was before it.
        """
        piece = b""
        try:
            for event in events:
                piece += self.feed(job, event)
                if len(piece) >= PIECE_BYTES:
                    yield piece
                    piece = b""
        except Exception:
            if piece:
                yield piece
            raise
        if piece:
            yield piece

    def end(self) -> bytes:
        """Return what follows when all jobs have ended."""
        if self._include_usage:
            tokens, chunks = self._places[0]
            self._places[0] = (tokens, chunks + 1)
        for job in range(len(self._jobs)):
            self._check_seen(job)
        if not self._include_usage or self._places[0] <= self._seen[0]:
            return DONE
        usage = total_usage(choices.usage for choices in self._jobs)
        return self._frame(0, self._encoder.usage(usage)) + DONE

    def _check_seen(self, job: int) -> None:
        """Refuse a claim to have seen what does not come before the job's next tokens."""
        place, seen = self._places[job], self._seen[job]
        if seen > place:
            raise InvalidRequestError(
                f"{format_place(seen).decode()} is the id of no event: there is nothing from "
                f"{format_place(place).decode()} until more tokens, or the end",
                field=_FIELD,
                limit=format_place(place).decode(),
            )

    def _next(self, job: int, encode: Callable[[Delta], bytes], delta: Delta) -> bytes:
        """Write a chunk that brings no tokens, unless the client has it."""
        tokens, chunks = self._places[job]
        place = self._places[job] = (tokens, chunks + 1)
        return self._frame(job, encode(delta)) if place > self._seen[job] else b""

    def _frame(self, job: int, payload: bytes) -> bytes:
        self._ids[job] = format_place(self._places[job])
        event_id = self._ids[0] if len(self._ids) == 1 else b",".join(self._ids)
        return b"id: %b\ndata: %b\n\n" % (event_id, payload)


def total_usage(usages: Iterable[Usage]) -> Usage:
    """Return the usage of several prompts together."""
    counts = [(u.prompt_tokens, u.cached_tokens, u.completion_tokens) for u in usages]
    return Usage(*(sum(column) for column in zip(*counts, strict=True)))
