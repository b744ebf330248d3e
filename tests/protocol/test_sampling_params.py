"""Sampling parameters: what is allowed, what is refused by name, and the wire form."""

from __future__ import annotations

import math
from typing import Any

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", -1),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.0),
        ("seed", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**24 + 1),
        ("max_tokens", "16"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", [""]),
        ("stop", ""),
        ("stop", [7]),
        ("stop", 7),
        ("stop", ["x"] * 65),
        ("stop", "x" * 257),
        ("stop", "\ud800"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [1] * 65),
        ("logprobs", -2),
        ("logprobs", 21),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", None),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: ") as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_k": -1},
        {"top_k": 0},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"min_p": 0, "seed": 0},
        {"seed": 2**63 - 1, "min_p": 1.0},
        {"max_tokens": None, "min_tokens": 100},
        {"max_tokens": 1, "min_tokens": 1},
        {"stop": "x" * 256},
        {"stop": None, "stop_token_ids": None},
        {"stop": ["a"] * 64, "stop_token_ids": [0, 2**31 - 1]},
        {"logprobs": 0, "ignore_eos": True},
        {"logprobs": 20, "skip_special_tokens": False, "include_stop_str_in_output": True},
    ],
)
def test_values_at_the_edge_are_allowed_and_come_back(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert SamplingParams.from_wire(params.to_wire()) == params


def test_defaults_take_no_space_on_the_wire() -> None:
    assert SamplingParams().to_wire() == {}


def test_a_parameter_of_a_later_version_is_refused_not_ignored() -> None:
    with pytest.raises(InvalidRequestError, match=r"params\.later"):
        SamplingParams.from_wire({"later": 3})


def test_stop_is_one_string_or_many() -> None:
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]) == SamplingParams(stop=("a", "b"))


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False)])
def test_a_tiny_temperature_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy
