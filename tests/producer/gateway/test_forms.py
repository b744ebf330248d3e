"""The form of an answer, from OpenAI's field and from vLLM's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferq.producer.gateway.requests.forms import requested_form
from inferq.protocol.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def json_schema(**changes: Any) -> dict[str, Any]:
    described = {"name": "answer", "schema": SCHEMA, **changes}
    return {"type": "json_schema", "json_schema": described}


def test_no_field_asks_for_no_form() -> None:
    assert requested_form({}) is None
    assert requested_form({"response_format": None, "guided_json": None}) is None
    assert requested_form({"response_format": {"type": "text"}}) is None


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"response_format": json_schema(strict=True)}, "json", SCHEMA),
        ({"response_format": json_schema(strict=None, description="d")}, "json", SCHEMA),
        ({"guided_json": SCHEMA}, "json", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json", SCHEMA),
        ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
        ({"guided_choice": ["yes", "no"]}, "choice", ["yes", "no"]),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"structured_outputs": {"regex": "[ab]+", "json": None}}, "regex", "[ab]+"),
        ({"structured_outputs": {"json_object": True}}, "json_object", True),
        ({"structured_outputs": {"choice": ["a"], "disable_fallback": True}}, "choice", ["a"]),
        ({"structured_outputs": {"choice": ["a"], "json_object": False}}, "choice", ["a"]),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "grammar", "start: /a/"),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "regex", "a"),
    ],
)
def test_a_field_asks_for_one_form(fields: dict[str, Any], kind: str, value: Any) -> None:
    form = requested_form(fields)
    assert form is not None
    ((found, given),) = form.outputs.to_wire().items()
    assert found == kind
    assert (json.loads(given) if kind == "json" else given) == value


def test_the_order_of_properties_is_kept() -> None:
    form = requested_form({"response_format": json_schema()})
    assert form is not None
    assert list(json.loads(str(form.outputs.json))["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": json_schema(name=None)}, "response_format.json_schema.name"),
        ({"response_format": json_schema(name="a b")}, "response_format.json_schema.name"),
        ({"response_format": json_schema(name="a" * 65)}, "response_format.json_schema.name"),
        ({"response_format": json_schema(strict=1)}, "response_format.json_schema.strict"),
        (
            {"response_format": json_schema(description=1)},
            "response_format.json_schema.description",
        ),
        ({"response_format": json_schema(schema=None)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(schema=[])}, "response_format.json_schema.schema"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": 3}, "guided_grammar"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ],
)
def test_what_is_malformed_or_unknown_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        requested_form(fields)
    assert caught.value.field == field


def test_two_forms_at_once_are_refused_by_both_names() -> None:
    both = {"response_format": {"type": "json_object"}, "guided_regex": "a"}
    with pytest.raises(InvalidRequestError, match="cannot go with response_format") as caught:
        requested_form(both)
    assert caught.value.field == "guided_regex"


def test_a_schema_that_is_too_long_or_too_deep_is_refused_with_the_limit() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"not": deep}
    with pytest.raises(InvalidRequestError) as caught:
        requested_form({"response_format": json_schema(schema=deep)})
    assert (caught.value.field, caught.value.limit) == ("response_format.json_schema.schema", "64")
    with pytest.raises(InvalidRequestError) as caught:
        requested_form({"guided_regex": "a" * 70_000})
    assert (caught.value.field, caught.value.limit) == ("guided_regex", "65536")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ],
)
def test_no_choices_are_called_so(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        requested_form(fields)
    assert (str(raised.value), raised.value.field) == (f"{field}: is empty", field)
