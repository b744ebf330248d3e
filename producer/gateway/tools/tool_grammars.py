"""Grammars, in Lark's syntax, of texts with tool calls whose arguments follow their schemas.

The worker's llguidance reads them: `%json` puts a schema in a grammar, a `lazy` terminal ends where
it first can, and `&` and `~` are terminals' intersection and complement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from inferq.producer.gateway.tools.tool_parsers import BEGIN, END

#: Lets a model write the mark-up in its own tokens, such as one that is a whole tag.
_OWN_TOKENS: Final = '%llguidance {"no_forcing": true}\n'
#: Between two parts of a JSON text; unbounded, a model may go on with spaces to its last token.
_WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,16}"
#: Arguments are written as the models' templates write them in earlier turns.
_ARGUMENTS: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: Keywords that say nothing about the form, and can be most of a schema's bytes.
_ANNOTATIONS: Final = frozenset({"title", "description", "$comment"})
#: Keywords whose values are data, and no schemas.
_DATA: Final = frozenset({"const", "enum", "default", "examples", "required"})
#: Keywords whose values have schemas by name.
_NAMED: Final = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)

_SPACE: Final = r"[ \t\r\n]*"
#: How a call that is JSON alone begins.
_JSON_BEGIN: Final = (
    rf'{_SPACE}\{{{_SPACE}("type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?"name"'
)


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called, and the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


def hermes_grammar(
    functions: Sequence[Function],
    *,
    is_required: bool,
    is_parallel: bool,
    content: Mapping[str, Any] | None,
) -> str:
    """Return the grammar of calls between `<tool_call>` tags.

    Without `is_required` there may be text beside them, or in their place JSON that follows the
    schema `content`.
    """
    if is_required or content is not None:
        several = ' ("\\n" call)*' if is_parallel else ""
        other = "" if is_required or content is None else f" | {_json(content)}"
        return f"{_OWN_TOKENS}start: call{several}{other}\n" + _hermes_calls(
            functions, f'"{BEGIN}"'
        )
    some = "call* TEXT?" if is_parallel else "TEXT? | call"
    return (
        f"{_OWN_TOKENS}start: {some}\nTEXT: /(?s:.*)/ & ~/(?s:.*){BEGIN}(?s:.*)/\n"
        f"begin[lazy]: /(?s:.*){BEGIN}/\n{_hermes_calls(functions, 'begin')}"
    )


def json_grammar(
    functions: Sequence[Function], *, is_required: bool, content: Mapping[str, Any] | None
) -> str:
    """Return the grammar of one call that is JSON alone, or else of text, or JSON like `content`.

    The models that call in this form were taught one call a turn.
    """
    if is_required:
        return "start: call\n" + _any_of(functions, "{}", '{"name": "%s", "parameters": ')
    if content is not None:
        # Texts that begin alike, so that only schemas can tell them apart.
        schemas = [content, *(_call_schema(function) for function in functions)]
        return "start: " + " | ".join(_json(schema) for schema in schemas)
    calls = _any_of(functions, "begin {}", ': "%s", "parameters": ')
    return (
        f"start: call | TEXT?\nTEXT: /(?s:.*)/ & ~/{_JSON_BEGIN}(?s:.*)/\n"
        f"begin[lazy]: /{_JSON_BEGIN}/\n{calls}"
    )


def _hermes_calls(functions: Sequence[Function], begin: str) -> str:
    end = json.dumps(f"\n{END}")
    return _any_of(functions, f'{begin} "\\n" {{}} {end}', '{"name": "%s", "arguments": ')


def _any_of(functions: Sequence[Function], around: str, header: str) -> str:
    """Return the rule of a call of one of the functions: `header`, arguments and a brace."""
    calls = []
    for function in functions:
        arguments = _json({**function.parameters, "type": "object"}, _ARGUMENTS)
        written = f'{json.dumps(header % function.name)} {arguments} "}}"'
        calls.append(around.replace("{}", written))
    return "call: " + "\n  | ".join(calls) + "\n"


def _call_schema(function: Function) -> dict[str, Any]:
    """Return the schema of a whole call."""
    parameters = {**function.parameters, "type": "object"}
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            "parameters": _bare(parameters, "#/properties/parameters"),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _json(schema: Mapping[str, Any], layout: Mapping[str, Any] | None = None) -> str:
    """Return a schema as a part of a grammar."""
    given = schema.get("x-guidance")
    guidance = {
        **(layout or {"whitespace_pattern": _WHITESPACE}),
        **(given if isinstance(given, Mapping) else {}),
    }
    return "%json " + json.dumps({**_bare(schema), "x-guidance": guidance}, ensure_ascii=False)


def _bare(schema: Any, root: str = "#") -> Any:
    """Return a schema without annotations; references to its own root point to `root`."""
    if isinstance(schema, list):
        return [_bare(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    bare: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            bare[key] = {name: _bare(item, root) for name, item in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            bare[key] = root + value[1:]
        elif key in _DATA:
            bare[key] = value
        elif key not in _ANNOTATIONS:
            bare[key] = _bare(value, root)
    return bare
