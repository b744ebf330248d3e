"""Events on the wire: round trips, cuts, every bad value, and random bytes."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq.protocol.errors import DecodeError, ErrorInfo
from inferq.protocol.messages import (
    MAX_EVENT_BYTES,
    Event,
    FinishReason,
    Terminal,
    Timings,
    TokenLogprob,
    Usage,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(0, 2**40)
terminals = st.builds(
    Terminal,
    st.sampled_from(FinishReason),
    st.builds(Usage, counts, counts, counts),
    st.builds(Timings, counts, counts, counts),
    counts,
    st.none() | st.builds(ErrorInfo, texts, texts, st.none() | texts, st.none() | texts),
)
logprobs = st.builds(
    TokenLogprob,
    st.floats(max_value=0, allow_nan=False),
    st.lists(st.tuples(counts, st.floats(max_value=0, allow_nan=False)), max_size=3).map(tuple),
)


@st.composite
def events(draw: st.DrawFn) -> Event:
    """Any event that a worker may publish."""
    token_ids = tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=5)))
    text = draw(texts)
    ends = sorted(draw(st.integers(0, len(text))) for _ in token_ids)
    return Event(
        index=draw(st.integers(0, 100)),
        offset=draw(counts),
        token_ids=token_ids,
        text=text,
        text_ends=tuple(ends),
        logprobs=draw(st.none() | st.tuples(*(logprobs for _ in token_ids))),
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        stop_reason=draw(st.none() | texts | st.integers(0, 2**31 - 1)),
        terminal=draw(st.none() | terminals),
        cumulative_logprob=draw(st.none() | st.floats(max_value=0, allow_nan=False)),
        prompt_logprobs=draw(st.none() | st.lists(st.none() | logprobs, max_size=3).map(tuple)),
        token_texts=draw(st.dictionaries(counts, st.binary(max_size=6), max_size=4)),
        prompt_token_ids=draw(st.none() | st.lists(counts, max_size=3).map(tuple)),
    )


@given(events())
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    assert Event.decode(event.encode()) == event


@given(events(), st.integers(0, 6))
def test_the_parts_of_a_cut_event_add_up(event: Event, count: int) -> None:
    count = min(count, len(event.token_ids))
    rest = event.after(count)
    assert rest.offset == event.offset + count
    assert event.token_ids[:count] + rest.token_ids == event.token_ids
    cut = event.text_ends[count - 1] if count else 0
    assert event.text[:cut] + rest.text == event.text
    assert (rest.index, rest.terminal) == (event.index, event.terminal)
    assert rest.cumulative_logprob == event.cumulative_logprob
    assert rest.prompt_logprobs == (None if count else event.prompt_logprobs)
    assert rest.prompt_token_ids == (None if count else event.prompt_token_ids)
    assert rest.token_texts == event.token_texts
    assert Event.decode(rest.encode()) == rest


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_are_an_event_or_refused(payload: bytes) -> None:
    try:
        event = Event.decode(payload)
    except DecodeError:
        return
    assert Event.decode(event.encode()) == event


wire_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["f", "p", "er", "q", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from("ioxtelfrc") | st.sampled_from(["end", "pl", "pt", "tx"]),
        wire_values,
        max_size=6,
    )
)
def test_random_maps_are_an_event_that_can_be_used_or_refused(wire: dict[str, Any]) -> None:
    try:
        event = Event.decode(msgpack.packb(wire))
    except DecodeError:
        return
    assert Event.decode(event.encode()).token_ids == event.token_ids
    assert event.after(1).offset == event.offset + 1


def test_a_token_takes_few_bytes() -> None:
    assert len(Event(offset=500, token_ids=(40_000,), text=" the", text_ends=(4,)).encode()) <= 22


@pytest.mark.parametrize(
    "wire",
    [
        {"i": -1},
        {"o": -1},
        {"i": "0"},
        {"o": True},
        {"t": 5},
        {"t": ["a"], "x": "a"},
        {"t": [True], "x": "a"},
        {"t": [-5], "x": "a"},
        {"t": [1, 2], "x": "ab"},
        {"t": [1, 2], "x": "ab", "e": [2, 1]},
        {"t": [1, 2], "x": "ab", "e": [1, 3]},
        {"t": [1, 2], "x": "ab", "e": [1]},
        {"t": [1], "x": "a", "e": 1},
        {"x": b"a"},
        {"f": "bored"},
        {"f": 1},
        {"r": [1]},
        {"l": 1},
        {"l": [[0.5]]},
        {"l": [["a", []]]},
        {"l": [[-0.5, [[1]]]]},
        {"t": [1], "x": "a", "l": []},
        {"pl": 1},
        {"pl": [None, 1]},
        {"c": "x"},
        {"end": None},
        {"end": {}},
        {"end": {"f": "bored"}},
        {"end": {"f": "stop", "p": "1"}},
        {"end": {"f": "error", "er": ["code"]}},
        {"end": {"f": "error", "er": [1, "message", None, None]}},
        {"end": {"f": "error", "er": None}},
    ],
)
def test_a_malformed_event_is_refused(wire: dict[str, Any]) -> None:
    with pytest.raises(DecodeError):
        Event.decode(msgpack.packb(wire))


def test_an_event_beyond_the_limit_is_refused() -> None:
    with pytest.raises(DecodeError, match="more than"):
        Event.decode(b"\x00" * (MAX_EVENT_BYTES + 1))


def test_every_token_has_a_text_end() -> None:
    with pytest.raises(ValueError, match="text end"):
        Event(token_ids=(1, 2), text="ab", text_ends=(1,))
