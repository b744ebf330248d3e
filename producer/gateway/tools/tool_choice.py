"""A body's `tools` and `tool_choice`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from inferq.producer.gateway.requests.forms import check_name, check_optional
from inferq.producer.gateway.tools.tool_grammars import Function
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.structured import StructuredOutputs

#: Most tools of a request, as OpenAI has it.
MAX_TOOLS: Final = 128

#: The arguments of a function that says nothing of them: none.
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"properties": {}, "additionalProperties": False}


class Mode(StrEnum):
    """What a model may do about tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    #: Call the one function that is named.
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What may be called, and whether something must be."""

    mode: Mode
    functions: tuple[Function, ...] = ()


def read_tool_choice(tools: Any, choice: Any) -> ToolChoice:
    """Return the choice among the functions of `tools`; auto where there are tools, else none.

    Raises `InvalidRequestError`, naming the field, for what is malformed or not supported.
    """
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidRequestError("is only allowed with tools", field="tool_choice")
        return ToolChoice(Mode.NONE)
    functions = _read_tools(tools)
    match choice:
        case None | "auto":
            return ToolChoice(Mode.AUTO, tuple(functions.values()))
        case "none":
            return ToolChoice(Mode.NONE)
        case "required":
            return ToolChoice(Mode.REQUIRED, tuple(functions.values()))
        case Mapping():
            return _read_object(choice, functions)
    raise InvalidRequestError(
        "must be none, auto, required, or an object that names what to call", field="tool_choice"
    )


def _read_object(choice: Mapping[str, Any], functions: Mapping[str, Function]) -> ToolChoice:
    kind = choice.get("type")
    if kind == "function":
        named = _named(choice, "tool_choice", functions)
        return ToolChoice(Mode.NAMED, (named,))
    if kind != "allowed_tools":
        raise InvalidRequestError("must be function or allowed_tools", field="tool_choice.type")
    field = "tool_choice.allowed_tools"
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, Mapping):
        raise InvalidRequestError("must be an object", field=field)
    mode = allowed.get("mode")
    if mode not in (Mode.AUTO.value, Mode.REQUIRED.value):
        raise InvalidRequestError("must be auto or required", field=f"{field}.mode")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise InvalidRequestError("must be a list that is not empty", field=f"{field}.tools")
    chosen = {
        function.name: function
        for index, tool in enumerate(listed)
        for function in [_named(tool, f"{field}.tools[{index}]", functions)]
    }
    return ToolChoice(Mode(mode), tuple(chosen.values()))


def _named(tool: Any, field: str, functions: Mapping[str, Function]) -> Function:
    described = _function_of(tool, field)
    name = described.get("name")
    if not isinstance(name, str) or name not in functions:
        raise InvalidRequestError("is not the name of one of tools", field=f"{field}.function.name")
    return functions[name]


def _read_tools(tools: Any) -> dict[str, Function]:
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidRequestError(
            f"must be a list of 1 to {MAX_TOOLS} tools", field="tools", limit=MAX_TOOLS
        )
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        function = _read_function(_function_of(tool, field), f"{field}.function")
        if function.name in functions:
            raise InvalidRequestError("is there twice", field=f"{field}.function.name")
        functions[function.name] = function
    return functions


def _function_of(tool: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping):
        raise InvalidRequestError("must be an object", field=field)
    if tool.get("type") != "function":
        raise InvalidRequestError("must be function, the kind supported", field=f"{field}.type")
    if not isinstance(tool.get("function"), Mapping):
        raise InvalidRequestError("must be an object", field=f"{field}.function")
    described: Mapping[str, Any] = tool["function"]
    return described


def _read_function(described: Mapping[str, Any], field: str) -> Function:
    name = check_name(f"{field}.name", described.get("name"))
    check_optional(f"{field}.description", described.get("description"), str, "text")
    check_optional(f"{field}.strict", described.get("strict"), bool, "true or false")
    parameters = described.get("parameters")
    check_optional(f"{field}.parameters", parameters, Mapping, "a JSON schema")
    if parameters is None:
        return Function(name, _NO_PARAMETERS)
    if parameters.get("type", "object") != "object":
        raise InvalidRequestError("must be object", field=f"{field}.parameters.type")
    try:
        StructuredOutputs(json=dict(parameters))
    except InvalidRequestError as error:
        raise error.of_field(f"{field}.parameters") from None
    return Function(name, parameters)
