"""Tools and their choice: what is refused, and what becomes of the job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferq.producer.gateway.requests.forms import requested_form
from inferq.producer.gateway.tools.offered_tools import ToolPlan, plan
from inferq.protocol.errors import InvalidRequestError


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = tool(parameters=PARAMETERS)
CLOCK = tool("clock")


def made(
    tools: Any = None,
    choice: Any = None,
    *,
    parallel: Any = None,
    fields: dict[str, Any] | None = None,
    tool_format: str = "hermes",
) -> ToolPlan:
    return plan(
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        form=requested_form(fields or {}),
        tool_format=tool_format,
    )


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: Any, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_without_tools_text_is_text() -> None:
    for choice in (None, "none"):
        without = made(choice=choice)
        assert without.form is None
        assert without.to_note() is None
        assert without.parser("job", 0).feed("<tool_call>{}") == ["<tool_call>{}"]


def test_with_tool_choice_none_the_model_is_not_told_of_tools_and_the_form_holds() -> None:
    without = made([WEATHER], "none", fields={"guided_regex": "a"})
    assert without.tools == ()
    assert without.form is not None
    assert without.form.outputs.regex == "a"
    assert without.form.field == "guided_regex"


def test_a_named_function_s_parameters_are_the_form() -> None:
    forced = made([WEATHER, CLOCK], named("weather"))
    assert forced.form is not None
    assert json.loads(str(forced.form.outputs.json)) == PARAMETERS
    assert forced.tools == (WEATHER, CLOCK)
    assert forced.form.field == "tools"


def test_a_function_without_parameters_takes_none() -> None:
    forced = made([CLOCK], named("clock"))
    assert forced.form is not None
    schema = json.loads(str(forced.form.outputs.json))
    assert schema == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
@pytest.mark.parametrize("choice", [None, "auto", "required", allowed("required", named("clock"))])
def test_other_choices_are_grammars_of_what_may_be_called(choice: Any, tool_format: str) -> None:
    free = made([WEATHER, CLOCK], choice, tool_format=tool_format)
    assert free.form is not None
    assert "clock" in str(free.form.outputs.grammar)
    is_narrow = isinstance(choice, dict)
    assert ("weather" in str(free.form.outputs.grammar)) is not is_narrow
    assert free.tools == (WEATHER, CLOCK)


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
@pytest.mark.parametrize("choice", ["auto", "required", named("weather"), "none"])
def test_a_plan_is_rebuilt_from_its_note(choice: Any, tool_format: str) -> None:
    first = made([WEATHER], choice, tool_format=tool_format)
    note = json.loads(json.dumps(first.to_note()))
    second = ToolPlan.from_note(note)
    assert second.to_note() == first.to_note()
    text = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    for written in (text, text[11:-12]):
        ours, theirs = first.parser("job", 1), second.parser("job", 1)
        assert ours.feed(written) + ours.finish() == theirs.feed(written) + theirs.finish()


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        (None, "auto", "tool_choice"),
        (None, "required", "tool_choice"),
        ([], None, "tools"),
        ({}, None, "tools"),
        ([CLOCK] * 129, None, "tools"),
        (["clock"], None, "tools[0]"),
        ([CLOCK, {"type": "custom", "custom": {"name": "a"}}], None, "tools[1].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool("a" * 65)], None, "tools[0].function.name"),
        ([CLOCK, tool("clock")], None, "tools[1].function.name"),
        ([tool(description=3)], None, "tools[0].function.description"),
        ([tool(strict="yes")], None, "tools[0].function.strict"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], None, "tools[0].function.parameters.type"),
        ([CLOCK], "any", "tool_choice"),
        ([CLOCK], 3, "tool_choice"),
        ([CLOCK], {"type": "custom"}, "tool_choice.type"),
        ([CLOCK], {"type": "function"}, "tool_choice.function"),
        ([CLOCK], named("weather"), "tool_choice.function.name"),
        ([CLOCK], named(["clock"]), "tool_choice.function.name"),
        ([CLOCK], {"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ([CLOCK], allowed("none", named("clock")), "tool_choice.allowed_tools.mode"),
        ([CLOCK], allowed("auto"), "tool_choice.allowed_tools.tools"),
        (
            [CLOCK],
            allowed("auto", named("clock"), named("x")),
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
    ],
)
def test_what_is_malformed_or_unknown_is_named(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        made(tools, choice)
    assert caught.value.field == field


def test_parameters_nested_too_deep_are_refused() -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"not": deep}
    with pytest.raises(InvalidRequestError) as caught:
        made([tool(parameters={"properties": {"a": deep}})])
    assert caught.value.field == "tools[0].function.parameters"


def test_schemas_too_long_together_are_refused_with_the_limit_but_not_for_their_descriptions() -> (
    None
):
    def tools(key: str) -> list[Any]:
        long = {"type": "string", key: "x" * 30_000}
        return [tool(f"f{k}", parameters={"properties": {"a": long}}) for k in range(3)]

    with pytest.raises(InvalidRequestError) as caught:
        made(tools("pattern"))
    assert (caught.value.field, caught.value.limit) == ("tools", "65536")
    assert len(str(made(tools("description")).form)) < 2_000


def test_parallel_tool_calls_is_true_or_false() -> None:
    with pytest.raises(InvalidRequestError, match="parallel_tool_calls"):
        made([CLOCK], parallel="no")


@pytest.mark.parametrize("choice", ["auto", "required", named("clock")])
def test_tools_do_not_go_with_a_form_that_is_not_json(choice: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        made([CLOCK], choice, fields={"guided_choice": ["a"]})
    assert caught.value.field == "guided_choice"
    assert made([CLOCK], choice, fields={"response_format": {"type": "json_object"}}).tools
