"""A stream is a function of its jobs' events: cut anywhere, what follows is the rest, once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq import FinishReason, InvalidRequestError, StreamEvent, TokenLogprob, Usage
from inferq.producer.gateway.answers import event_writer
from inferq.producer.gateway.answers.answer import JobAnswer, response_body
from inferq.producer.gateway.answers.choices import JobChoices
from inferq.producer.gateway.answers.chunks import ChunkEncoder
from inferq.producer.gateway.answers.event_writer import EventWriter, parse_places
from inferq.producer.gateway.answers.note import Kind, Note

JOB = f"{1_795_000_000_000:012x}{7:020x}-0"
OTHER = f"{1_795_000_000_000:012x}{8:020x}-0"


def job_events(job_id: str, turns: Sequence[tuple[int, str]], n: int) -> list[StreamEvent]:
    """Return the events of outputs that take turns: (output, text), a token each; then the end."""
    events, counts, total = [], [0] * n, 0
    for index, text in turns:
        total += 1
        events.append(
            StreamEvent(
                job_id=job_id,
                index=index,
                offset=counts[index],
                token_ids=(total,),
                text=text,
                logprobs=(TokenLogprob(-1.0, ((total, -1.0), (total + 1, -2.0))),),
                finish_reason=None,
                stop_reason=None,
                usage=None,
                next_offset=total,
                token_texts={total: text.encode(), total + 1: b"\xff"},
                prompt_token_ids=(5, 6) if total == 1 else None,
            )
        )
        counts[index] += 1
    for index in range(n):
        last = max((k for k, event in enumerate(events) if event.index == index), default=None)
        if last is not None and index > 0:
            events[last] = replace(events[last], finish_reason=FinishReason.LENGTH)
    end = StreamEvent(
        job_id, 0, counts[0], (), "!", (), FinishReason.STOP, "stop", Usage(2, 1, total), total
    )
    return [*events, end]


def frames(stream: bytes) -> list[tuple[str | None, Any]]:
    """Return the (id, data) of every event, [DONE] as it is."""
    found: list[tuple[str | None, Any]] = []
    for block in stream.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        found.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return found


def write(
    notes: Sequence[Note],
    streams: Sequence[list[StreamEvent]],
    order: Sequence[int],
    event_id: str | None = None,
) -> bytes:
    jobs = [JobChoices(note, s[0].job_id) for note, s in zip(notes, streams, strict=True)]
    seen = None if event_id is None else parse_places(event_id, len(jobs))
    writer = EventWriter(jobs, ChunkEncoder(notes[0], streams[0][0].job_id), seen)
    left = [iter(stream) for stream in streams]
    return b"".join(writer.feed(job, next(left[job])) for job in order) + writer.end()


kinds = st.sampled_from(list(Kind))
flags = st.fixed_dictionaries(
    {
        "include_usage": st.booleans(),
        "continuous_usage": st.booleans(),
        "token_ids": st.booleans(),
        "logprobs": st.sampled_from([None, 2]),
    }
)
texts = st.sampled_from(["a", "", " b", "ü"])


@settings(max_examples=40)
@given(kinds, flags, st.lists(st.tuples(st.integers(0, 2), texts), min_size=1, max_size=8))
def test_a_stream_cut_after_any_event_goes_on_with_the_rest(
    kind: Kind, options: dict[str, Any], turns: list[tuple[int, str]]
) -> None:
    note = Note(kind=kind, model="m", n=3, **options)
    events = job_events(JOB, turns, 3)
    whole = frames(write([note], [events], [0] * len(events)))
    assert whole[-1] == (None, "[DONE]")
    ids = [event_id for event_id, _ in whole[:-1]]
    assert len(set(ids)) == len(ids)
    for cut, event_id in enumerate(ids, start=1):
        assert frames(write([note], [events], [0] * len(events), event_id)) == whole[cut:]


def test_what_comes_together_is_the_same_bytes_in_pieces_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note = Note(kind=Kind.CHAT, model="m", n=1, include_usage=True)
    events = job_events(JOB, [(0, f"{i} ") for i in range(20)], 1)
    alone = write([note], [events], [0] * len(events))

    def pieces() -> list[bytes]:
        writer = EventWriter([JobChoices(note, JOB)], ChunkEncoder(note, JOB))
        return [*writer.feed_all(0, events), writer.end()]

    assert len(pieces()) == 2
    assert b"".join(pieces()) == alone
    monkeypatch.setattr(event_writer, "PIECE_BYTES", 1000)
    frame = max(len(block) for block in alone.split(b"\n\n")) + 2
    assert len(pieces()) > 4
    assert max(map(len, pieces())) < 1000 + 2 * frame
    assert b"".join(pieces()) == alone


def test_what_was_before_an_error_is_written_before_it_is_raised() -> None:
    note = Note(kind=Kind.CHAT, model="m", n=1)
    events = job_events(JOB, [(0, "a"), (0, "b")], 1)
    writer = EventWriter([JobChoices(note, JOB)], ChunkEncoder(note, JOB))
    pieces = writer.feed_all(0, [*events[:2], replace(events[2], index=7)])
    assert len(frames(next(pieces))) == 3  # the role and two tokens
    with pytest.raises(IndexError):
        next(pieces)


@settings(max_examples=40)
@given(kinds, st.data())
def test_a_stream_of_two_jobs_goes_on_with_what_is_missing_of_each(
    kind: Kind, data: st.DataObject
) -> None:
    turn = st.lists(st.tuples(st.integers(0, 1), texts), min_size=1, max_size=4)
    streams = [job_events(job_id, data.draw(turn), 2) for job_id in (JOB, OTHER)]
    notes = [
        Note(kind=kind, model="m", n=2, position=k, prompts=2, include_usage=True) for k in (0, 1)
    ]
    order = [k for k, stream in enumerate(streams) for _ in stream]
    whole = frames(write(notes, streams, data.draw(st.permutations(order))))
    for cut in range(1, len(whole)):
        again = data.draw(st.permutations(order))
        rest = frames(write(notes, streams, again, whole[cut - 1][0]))
        assert _text(whole[:cut] + rest) == _text(whole)
        assert len(rest) == len(whole) - cut


def _text(stream: list[tuple[str | None, Any]]) -> dict[int, str]:
    told: dict[int, str] = {}
    for _, chunk in stream:
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            told[choice["index"]] = told.get(choice["index"], "") + text
    return told


@settings(max_examples=40)
@given(kinds, st.lists(st.tuples(st.integers(0, 1), texts), min_size=1, max_size=8))
def test_a_stream_and_a_whole_answer_say_the_same(kind: Kind, turns: list[tuple[int, str]]) -> None:
    note = Note(kind=kind, model="m", n=2, include_usage=True)
    events = job_events(JOB, turns, 2)
    stream = frames(write([note], [events], [0] * len(events)))
    answer = JobAnswer(JobChoices(note, JOB))
    for event in events:
        answer.feed(event)
    body = response_body(note, JOB, [answer])
    told = _text(stream)
    for choice in body["choices"]:
        text = choice["text"] if kind is Kind.COMPLETION else choice["message"]["content"]
        assert text == told.get(choice["index"], "")
    assert stream[-2][1]["usage"] == body["usage"]
    assert stream[-2][1]["choices"] == []


def test_a_chat_has_a_role_then_content_then_an_end_then_usage() -> None:
    note = Note(kind=Kind.CHAT, model="m", include_usage=True)
    stream = frames(write([note], [job_events(JOB, [(0, "Hi")], 1)], [0, 0]))
    deltas = [chunk["choices"][0]["delta"] for _, chunk in stream[:4]]
    assert deltas == [
        {"role": "assistant", "content": ""}, {"content": "Hi"}, {"content": "!"}, {},
    ]  # fmt: skip
    assert [event_id for event_id, _ in stream] == ["0-1", "1", "1-1", "1-2", "1-3", None]
    assert [chunk["choices"][0]["finish_reason"] for _, chunk in stream[:4]][-2:] == [None, "stop"]
    assert all(chunk["usage"] is None for _, chunk in stream[:4])
    assert stream[4][1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_an_error_ends_no_choice() -> None:
    note = Note(kind=Kind.CHAT, model="m")
    event = replace(job_events(JOB, [(0, "Hi")], 1)[0], finish_reason=FinishReason.CANCELLED)
    writer = EventWriter([JobChoices(note, JOB)], ChunkEncoder(note, JOB))
    chunks = frames(writer.feed(0, event))
    assert [chunk["choices"][0]["finish_reason"] for _, chunk in chunks] == [None, None]


@pytest.mark.parametrize(
    "event_id",
    [
        "-1",
        "abc",
        "",
        "1,",
        "1.5",
        "1-",
        "1-2-3",
        "1-0",
        "0-0",
        "1-01",
        "05",
        " ",
        "9" * 30,
        "1,2",
        "٣",
    ],
)
def test_what_is_no_event_id_is_refused(event_id: str) -> None:
    with pytest.raises(InvalidRequestError, match="Last-Event-ID"):
        parse_places(event_id, 1)


def test_an_id_beyond_the_end_is_refused_when_that_is_known() -> None:
    note = Note(kind=Kind.CHAT, model="m")
    events = job_events(JOB, [(0, "Hi")], 1)
    with pytest.raises(InvalidRequestError, match="Last-Event-ID"):
        write([note], [events], [0, 0], "2")


@pytest.mark.parametrize("usage", [False, True])
def test_an_id_is_one_of_an_event_or_a_number_of_tokens(usage: bool) -> None:
    note = Note(kind=Kind.CHAT, model="m", n=2, include_usage=usage)
    events = job_events(JOB, [(0, "Hi"), (1, "Ho"), (1, "!"), (0, "?")], 2)
    order = [0] * len(events)
    ids = {event_id for event_id, _ in frames(write([note], [events], order)) if event_id}
    most = max(int(event_id.partition("-")[0]) for event_id in ids)
    for tokens in range(most + 2):
        for chunk in range(5):
            event_id = f"{tokens}-{chunk}" if chunk else f"{tokens}"
            if event_id in ids or (tokens <= most and not chunk):
                write([note], [events], order, event_id)
            else:
                with pytest.raises(InvalidRequestError, match="Last-Event-ID"):
                    write([note], [events], order, event_id)


def test_a_note_survives_its_encoding_and_nothing_else_is_one() -> None:
    note = Note(kind=Kind.CHAT, model="m", n=2, jobs=("a", "b"), key="k", logprobs=3)
    assert Note.decode(note.encode()) == note
    for payload in (None, b"", b"{}", b"\xff", b'{"v":1}', b'{"v":1,"kind":"x"}', b"[]"):
        assert Note.decode(payload) is None
