"""Stop strings are found wherever they lie, and nothing of them is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq.worker.engine.text.stop import StopMatch, StopMatcher

Pieces = list[str]


def _feed(stops: tuple[str, ...], pieces: Pieces) -> StopMatch | None:
    matcher = StopMatcher(stops)
    return next((match for piece in pieces if (match := matcher.feed(piece))), None)


def test_a_stop_inside_a_piece_is_found_by_search():
    assert _feed(("DE",), ["AB", "CDEF"]) == StopMatch("DE", num_from_start=3, num_after=1)


def test_a_stop_over_many_pieces_is_found_in_the_last_of_them():
    assert _feed(("DEFG",), ["CD", "E", "F", "GH"]) == StopMatch("DEFG", 5, 1)


@pytest.mark.parametrize("stops", [("a", "is", ","), (",", "is", "a"), ("is", "a", ",")])
def test_the_earliest_position_wins_whatever_the_order_of_the_list(stops):
    match = _feed(stops, [" The user is a"])
    assert match is not None
    assert match.stop == "is"


@pytest.mark.parametrize("stops", [("ab", "abcd", "abc"), ("abcd", "abc", "ab")])
def test_at_one_position_the_longest_wins(stops):
    assert _feed(stops, ["xabcdx"]) == StopMatch("abcd", 5, 1)


def test_of_stops_that_complete_in_one_piece_the_one_that_began_before_it_wins():
    assert _feed(("bc", "abcd"), ["a", "bcd"]) == StopMatch("abcd", 4, 0)


def test_a_stop_that_completes_first_wins_over_one_that_began_earlier():
    assert _feed(("bc", "abcd"), ["a", "b", "c", "d"]) == StopMatch("bc", 2, 0)


@pytest.mark.parametrize(
    ("stops", "text", "held"),
    [
        (("Observation:",), "... Obs", 3),
        (("Observation:",), "... ObsO", 1),
        (("aab",), "aaaa", 2),
        (("abab!", "b?"), "xabab", 4),
        (("###",), "text", 0),
    ],
)
def test_only_what_could_still_become_a_stop_is_held(stops, text, held):
    matcher = StopMatcher(stops)
    matcher.feed(text)
    assert matcher.num_held == held


def test_a_stop_that_does_not_count_yet_is_passed_over_and_not_held():
    matcher = StopMatcher(("ab",))
    assert matcher.feed("ab", counts=False) is None
    assert matcher.num_held == 0
    assert matcher.feed("ab") == StopMatch("ab", 2, 0)


def test_a_stop_that_began_before_stops_count_is_found():
    matcher = StopMatcher(("abc",))
    assert matcher.feed("ab", counts=False) is None
    assert matcher.feed("c") == StopMatch("abc", 3, 0)


def _expected(stops: tuple[str, ...], pieces: Pieces, first_counting: int) -> StopMatch | None:
    """Search the whole text after each piece for stops that completed within it."""
    text = ""
    for i, piece in enumerate(pieces):
        before, text = len(text), text + piece
        found = [
            (start, -len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        if found and i >= first_counting:
            start, _, stop = min(found)
            return StopMatch(stop, len(text) - start, len(text) - start - len(stop))
    return None


def _expected_held(stops: tuple[str, ...], text: str) -> int:
    ends = (text[-length:] for length in range(1, len(text) + 1))
    return max(
        (len(end) for end in ends if any(s != end and s.startswith(end) for s in stops)), default=0
    )


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5).map(tuple),
    pieces=st.lists(st.text("abcd", max_size=4), max_size=12),
    first_counting=st.integers(0, 5),
)
def test_matches_and_held_text_are_those_of_a_plain_search(stops, pieces, first_counting):
    matcher = StopMatcher(stops)
    found = None
    for i, piece in enumerate(pieces):
        found = matcher.feed(piece, counts=i >= first_counting)
        if found is not None:
            break
        assert matcher.num_held == _expected_held(stops, "".join(pieces[: i + 1]))
    assert found == _expected(stops, pieces, first_counting)
