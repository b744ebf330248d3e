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


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"best_of": 0}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "temperature": 0}, "best_of"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"beam_width": 2, "best_of": 2}, "best_of"),
        ({"beam_width": 2, "top_k": 5}, "top_k"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p"),
        ({"beam_width": 2, "min_p": 0.5}, "min_p"),
        ({"beam_width": 2, "temperature": 0.7}, "temperature"),
        ({"beam_width": 2, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"beam_width": 2, "logprobs": 0}, "logprobs"),
        ({"beam_width": 2, "early_stopping": "later"}, "early_stopping"),
        ({"beam_width": 2, "length_penalty": math.inf}, "length_penalty"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {5: 101}}, "logit_bias"),
        ({"logit_bias": {-1: 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": 3}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"detokenize": 1}, "detokenize"),
        ({"detokenize": False, "stop": "x"}, "stop"),
        ({"spaces_between_special_tokens": "no"}, "spaces_between_special_tokens"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"a": {1, 2}}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "x" * 65537}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": "json"}, "structured_outputs"),
    ],
    ids=str,
)
def test_outputs_edits_and_forms_out_of_range_are_refused_by_name(
    values: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams(**values)
    assert refused.value.field == field


def test_a_schema_nested_too_deep_is_refused_without_recursion() -> None:
    schema: dict[str, Any] = {}
    for _ in range(500):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        SamplingParams(structured_outputs={"json": schema})


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    schema = {"properties": {"b": {}, "a": {}}}
    form = SamplingParams(structured_outputs={"json": schema}).structured_outputs
    assert form is not None
    assert isinstance(form.json, str)
    assert form.json.index('"b"') < form.json.index('"a"')


@pytest.mark.parametrize(
    "values",
    [
        {"n": 3, "best_of": 5, "presence_penalty": -2, "frequency_penalty": 2},
        {"beam_width": 4, "n": 2, "length_penalty": 0.5, "early_stopping": "never"},
        {"logit_bias": {7: 1.5, 3: -100}, "bad_words": ["a", "b c"], "allowed_token_ids": [1, 2]},
        {"prompt_logprobs": -1, "logprobs": -1, "truncate_prompt_tokens": -1},
        {"structured_outputs": {"choice": ["a", "b"]}, "detokenize": False},
        {"structured_outputs": {"json_object": True}},
    ],
    ids=str,
)
def test_outputs_edits_and_forms_come_back_from_the_wire(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert SamplingParams.from_wire(params.to_wire()) == params
