"""The form that an answer must have, from a body's fields: OpenAI's `response_format`, vLLM's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.structured import StructuredOutputs

#: The fields of a body that ask for a form.
FORM_FIELDS: Final = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
#: What OpenAI takes as the name of a function or a schema.
NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")

_KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")
#: Of vLLM's `structured_outputs`: asks not to fall back to another backend, of which there is none.
_NO_FALLBACK: Final = "disable_fallback"


@dataclass(frozen=True, slots=True)
class Form:
    """A form, and the body's field that asked for it."""

    outputs: StructuredOutputs
    field: str

    @property
    def is_json(self) -> bool:
        """Whether the text must be JSON, as a schema or any object."""
        return self.outputs.json is not None or self.outputs.json_object


def requested_form(fields: Mapping[str, Any]) -> Form | None:
    """Return the one form that a body's `FORM_FIELDS` ask for, if any.

    Raises `InvalidRequestError` for two that ask at once, naming both, and for malformed ones.
    """
    given = [(name, fields[name]) for name in FORM_FIELDS if fields.get(name) is not None]
    forms = [form for name, value in given if (form := _form(name, value)) is not None]
    if len(forms) > 1:
        raise InvalidRequestError(
            f"cannot go with {forms[0].field}: an answer has one form", field=forms[1].field
        )
    return forms[0] if forms else None


def _form(name: str, value: Any) -> Form | None:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return _checked(name, {name.removeprefix("guided_"): value})


def _response_format(value: Any) -> Form | None:
    name = "response_format"
    if not isinstance(value, Mapping):
        raise InvalidRequestError("must be an object", field=name)
    kind = value.get("type")
    reader = _RESPONSE_FORMATS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        known = ", ".join(_RESPONSE_FORMATS)
        raise InvalidRequestError(f"must be one of {known}", field=f"{name}.type")
    return reader(value)


def _json_schema(value: Mapping[str, Any]) -> Form:
    field = "response_format.json_schema"
    described = value.get("json_schema")
    if not isinstance(described, Mapping):
        raise InvalidRequestError("must be an object", field=field)
    check_name(f"{field}.name", described.get("name"))
    check_optional(f"{field}.description", described.get("description"), str, "text")
    check_optional(f"{field}.strict", described.get("strict"), bool, "true or false")
    if not isinstance(described.get("schema"), Mapping):
        raise InvalidRequestError("is required: a JSON schema", field=f"{field}.schema")
    return _checked(f"{field}.schema", {"json": described["schema"]})


#: How each type of `response_format` is read.
_RESPONSE_FORMATS: Final[Mapping[str, Callable[[Mapping[str, Any]], Form | None]]] = (
    MappingProxyType(
        {
            "text": lambda _: None,
            "json_object": lambda _: _checked("response_format", {"json_object": True}),
            "json_schema": _json_schema,
        }
    )
)


def _structured_outputs(value: Any) -> Form | None:
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise InvalidRequestError("must be an object", field=name)
    given = {key: v for key, v in value.items() if v is not None and v is not False}
    given.pop(_NO_FALLBACK, None)
    unknown = sorted(set(given) - set(_KINDS))
    if unknown:
        raise InvalidRequestError("is not supported", field=f"{name}.{unknown[0]}")
    return _checked(name, given)


def _checked(field: str, kinds: Mapping[str, Any]) -> Form:
    """Return the form; errors name `field`, the body's, in place of the protocol's own."""
    if isinstance(kinds.get("choice"), str):
        raise InvalidRequestError("must be a list", field=_body_field(field, f"{field}.choice"))
    if kinds.get("choice") == []:
        raise InvalidRequestError("is empty", field=_body_field(field, f"{field}.choice"), limit=1)
    try:
        return Form(StructuredOutputs(**kinds), field)
    except InvalidRequestError as error:
        raise error.of_field(_body_field(field, error.field)) from None


def _body_field(field: str, protocol_field: str) -> str:
    return protocol_field if field == "structured_outputs" else field


def check_name(field: str, value: Any) -> str:
    """Return the name of a function or schema; raises `InvalidRequestError` for what is none."""
    if not isinstance(value, str) or NAME.fullmatch(value) is None:
        raise InvalidRequestError(
            "is required: 1 to 64 letters, digits, underscores and dashes", field=field, limit=64
        )
    return value


def check_optional(field: str, value: Any, kind: type, described: str) -> None:
    """Raise `InvalidRequestError` unless the value is absent or of its kind."""
    if value is not None and not isinstance(value, kind):
        raise InvalidRequestError(f"must be {described}", field=field)
