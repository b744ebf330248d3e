"""JSON values inside messages: copied, bounded, and nothing else."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.json_values import MAX_JSON_DEPTH, json_object, read_object

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@given(st.dictionaries(texts, values, max_size=4))
def test_an_object_is_copied_whole(value: dict[str, Any]) -> None:
    copied = json_object("f", value, max_bytes=2**20)
    assert copied == value
    assert copied is not value
    assert read_object("f", json.dumps(value)) == value


def test_a_copy_does_not_follow_what_becomes_of_the_original() -> None:
    inner: list[Any] = [1]
    copied = json_object("f", {"a": inner, "b": (1, 2)}, max_bytes=100)
    inner.append(2)
    assert copied == {"a": [1], "b": [1, 2]}


@pytest.mark.parametrize(
    "value",
    [
        5,
        [1],
        None,
        {1: 2},
        {"a": b"bytes"},
        {"a": {1, 2}},
        {"a": math.nan},
        {"a": [math.inf]},
        {"a": "\ud800"},
        {"\udfff": 1},
        {"a": 2**64},
        {"a": -(2**63) - 1},
        {"a": object()},
        {"a": nested(MAX_JSON_DEPTH)},
        {"a": "x" * 100},
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_bounded_json_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        json_object("the field", value, max_bytes=100)
    assert caught.value.field == "the field"


def test_the_deepest_nesting_allowed_passes() -> None:
    deepest = {"a": nested(MAX_JSON_DEPTH - 1)}
    assert json_object("f", deepest, max_bytes=1000) == deepest


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", "5", '{"a": NaN}', '{"a": 1e999}', "[" * 10**6, '{"a":' * 99]
)
def test_text_that_spells_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_object("the field", text)
    assert caught.value.field == "the field"
