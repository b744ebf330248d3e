"""Tools of a chat: made a form of the answer, and found again in its text.

A choice is kept by construction: what the model may write is a schema or grammar that the worker
enforces, so a function that must be called is, and arguments follow their schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from inferq.producer.gateway.requests.forms import Form, check_optional
from inferq.producer.gateway.tools.tool_choice import Mode, ToolChoice, read_tool_choice
from inferq.producer.gateway.tools.tool_deltas import Part, ToolDelta, assemble
from inferq.producer.gateway.tools.tool_grammars import hermes_grammar, json_grammar
from inferq.producer.gateway.tools.tool_parsers import (
    ArgumentsParser,
    HermesParser,
    JsonParser,
    TextParser,
    ToolParser,
)
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.structured import MAX_FORM_BYTES, StructuredOutputs

__all__ = ["Part", "ToolDelta", "ToolFormat", "ToolParser", "ToolPlan", "assemble", "plan"]


class ToolFormat(StrEnum):
    """How a model was taught to write calls."""

    #: `<tool_call>` tags around `{"name": …, "arguments": {…}}`: Qwen, Hermes, SmolLM.
    HERMES = "hermes"
    #: `{"name": …, "parameters": {…}}` in place of text: Llama 3.
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """What a chat's tools make of the job, and how its text becomes calls.

    - `form`: what the job's text must have; `tools` for its template.
    - `name`: of the one function that must be called.

    One that `from_note` rebuilt can make parsers, and no more.
    """

    mode: Mode = Mode.NONE
    tool_format: ToolFormat = ToolFormat.HERMES
    name: str | None = None
    form: Form | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    def to_note(self) -> dict[str, Any] | None:
        """Return what a replica needs to make the same parsers, as JSON; None: text is content."""
        if self.mode is Mode.NONE:
            return None
        if self.mode is Mode.NAMED:
            return {"mode": self.mode.value, "name": self.name}
        return {"mode": self.mode.value, "format": self.tool_format.value}

    @classmethod
    def from_note(cls, note: Mapping[str, Any] | None) -> Self:
        """Rebuild a plan from `to_note`'s form."""
        if note is None:
            return cls()
        return cls(
            mode=Mode(note["mode"]),
            tool_format=ToolFormat(note.get("format", ToolFormat.HERMES)),
            name=note.get("name"),
        )

    def parser(self, job_id: str, output_index: int) -> ToolParser:
        """Return a parser for one output of the job."""
        if self.mode is Mode.NONE:
            return TextParser(job_id, output_index)
        if self.name is not None:
            return ArgumentsParser(job_id, output_index, self.name)
        kind = JsonParser if self.tool_format is ToolFormat.JSON else HermesParser
        return kind(job_id, output_index, is_calls_only=self.mode is Mode.REQUIRED)


def plan(
    *,
    tools: Any,
    tool_choice: Any,
    parallel_tool_calls: Any,
    form: Form | None,
    tool_format: ToolFormat | str,
) -> ToolPlan:
    """Return what a chat's body asks for; a form besides is for the content, where there is any.

    Raises `InvalidRequestError`, naming the field, for what is malformed or cannot go together.
    """
    check_optional("parallel_tool_calls", parallel_tool_calls, bool, "true or false")
    choice = read_tool_choice(tools, tool_choice)
    if choice.mode is Mode.NONE:
        return ToolPlan(form=form)
    if form is not None and not form.is_json:
        raise InvalidRequestError(
            "cannot go with tools, whose calls are a form of their own", field=form.field
        )
    made = ToolFormat(tool_format)
    return ToolPlan(
        mode=choice.mode,
        tool_format=made,
        name=choice.functions[0].name if choice.mode is Mode.NAMED else None,
        form=Form(_form_of_calls(choice, made, parallel_tool_calls is not False, form), "tools"),
        tools=tuple(tools),
    )


def _form_of_calls(
    choice: ToolChoice, tool_format: ToolFormat, is_parallel: bool, form: Form | None
) -> StructuredOutputs:
    if choice.mode is Mode.NAMED:
        return StructuredOutputs(json={**choice.functions[0].parameters, "type": "object"})
    is_required = choice.mode is Mode.REQUIRED
    content = None if form is None else _content_schema(form.outputs)
    if tool_format is ToolFormat.JSON:
        grammar = json_grammar(choice.functions, is_required=is_required, content=content)
    else:
        grammar = hermes_grammar(
            choice.functions, is_required=is_required, is_parallel=is_parallel, content=content
        )
    size = len(grammar.encode())
    if size > MAX_FORM_BYTES:
        raise InvalidRequestError(
            f"their schemas are a grammar of {size} bytes, more than {MAX_FORM_BYTES}",
            field="tools",
            limit=MAX_FORM_BYTES,
        )
    return StructuredOutputs(grammar=grammar)


def _content_schema(form: StructuredOutputs) -> dict[str, Any]:
    if form.json is None:
        return {"type": "object"}
    schema: dict[str, Any] = json.loads(str(form.json))
    return schema
