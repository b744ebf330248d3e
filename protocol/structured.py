"""What form an output must have: a JSON schema, a regular expression, a choice, a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.param_checks import check_boolean, check_utf8, strings

#: Most bytes of a schema, expression or grammar.
MAX_FORM_BYTES: Final = 64 * 1024
MAX_CHOICES: Final = 1024
#: Longest choice, in characters.
MAX_CHOICE_LENGTH: Final = 1024
#: Deepest nesting of a schema given as an object.
MAX_SCHEMA_DEPTH: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The form that an output must have; exactly one of the fields is given.

    - `json`: a JSON schema, as an object or its text.
    - `json_object`: any JSON object.
    - `regex`: a regular expression that the whole text matches.
    - `choice`: one of these texts.
    - `grammar`: a context-free grammar in Lark's syntax.

    Raises `InvalidRequestError` for what is malformed here; whether the schema, expression or
    grammar can be compiled is found by the worker, with the same kind of error.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | tuple[str, ...] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        check_boolean("structured_outputs.json_object", self.json_object)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None:
                _check_text(f"structured_outputs.{name}", value)
        choice = strings(
            "structured_outputs.choice", self.choice, most=MAX_CHOICES, longest=MAX_CHOICE_LENGTH
        )
        object.__setattr__(self, "choice", choice)
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if len(given) != 1:
            raise InvalidRequestError(
                "needs exactly one of json, json_object, regex, choice and grammar, "
                f"not {' and '.join(given) or 'none'}",
                field="structured_outputs",
                limit=1,
            )

    def to_wire(self) -> dict[str, Any]:
        """The one field that is given, by name."""
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                return {f.name: list(value) if isinstance(value, tuple) else value}
        raise AssertionError("one field is always given")

    @classmethod
    def from_wire(cls, wire: Any) -> StructuredOutputs:
        """Rebuild from `to_wire`'s form; an unknown name is an error."""
        if not isinstance(wire, Mapping):
            raise InvalidRequestError("must be an object", field="structured_outputs")
        unknown = sorted(set(wire) - {f.name for f in fields(cls)})
        if unknown:
            raise InvalidRequestError(
                "is not a form that this version supports", field=f"structured_outputs.{unknown[0]}"
            )
        return cls(**wire)


def _schema_text(schema: object) -> str:
    """Return a schema as JSON text; the order of properties is kept, since outputs follow it."""
    field = "structured_outputs.json"
    if isinstance(schema, str):
        _check_text(field, schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"is not JSON: {error}", field=field) from None
    if not isinstance(schema, Mapping):
        raise InvalidRequestError("a schema is a JSON object", field=field)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"is not a JSON schema: {error}", field=field) from None
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(
            f"is nested deeper than {MAX_SCHEMA_DEPTH}", field=field, limit=MAX_SCHEMA_DEPTH
        )
    _check_text(field, text)
    return text


def _depth(value: object) -> int:
    level, depth = [value], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        depth += 1
        level = [
            child
            for item in level
            if isinstance(item, (Mapping, list))
            for child in (item.values() if isinstance(item, Mapping) else item)
        ]
    return depth


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise InvalidRequestError("must be text that is not empty", field=field)
    size = len(check_utf8(field, text))
    if size > MAX_FORM_BYTES:
        raise InvalidRequestError(
            f"{size} bytes are more than {MAX_FORM_BYTES}", field=field, limit=MAX_FORM_BYTES
        )
