"""JSON schemas of what each operation answers with, for the OpenAPI schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

_TEXT: Final = {"type": "string"}
_MAYBE_TEXT: Final = {"type": ["string", "null"]}
_COUNT: Final = {"type": "integer", "minimum": 0}
_MAYBE_OBJECT: Final = {"type": ["object", "null"]}
_FINISH_REASON: Final = {"enum": ["stop", "length", "tool_calls"]}
_COUNTS: Final = {"type": "array", "items": _COUNT}


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has at least these properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _many(item: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": item, **more}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _choice(**content: Any) -> dict[str, Any]:
    """Return the schema of a choice."""
    return _object(
        index=_COUNT,
        **content,
        logprobs=_MAYBE_OBJECT,
        finish_reason=_FINISH_REASON,
        stop_reason={"type": ["string", "integer", "null"]},
    )


def _response(kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    return _object(
        id=_TEXT,
        object={"const": kind},
        created=_COUNT,
        model=_TEXT,
        choices=_many(choice, minItems=1),
        usage=_ref("Usage"),
    )


_TOOL_CALL: Final = _object(
    id=_TEXT, type={"const": "function"}, function=_object(name=_TEXT, arguments=_TEXT)
)
_MESSAGE: Final = _object(role={"const": "assistant"}, content=_MAYBE_TEXT)
_MESSAGE["properties"]["tool_calls"] = _many(_TOOL_CALL, minItems=1)

#: Schemas by name.
SHAPES: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "Usage": _object(
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            total_tokens=_COUNT,
            prompt_tokens_details=_object(cached_tokens=_COUNT),
        ),
        "Completion": _response("text_completion", _choice(text=_TEXT)),
        "ChatCompletion": _response("chat.completion", _choice(message=_MESSAGE)),
        "Model": _object(
            id=_TEXT,
            object={"const": "model"},
            created=_COUNT,
            owned_by=_TEXT,
            root=_TEXT,
            parent=_MAYBE_TEXT,
            max_model_len={"type": ["integer", "null"]},
        ),
        "Models": _object(object={"const": "list"}, data=_many(_ref("Model"))),
        "Tokens": _object(
            count=_COUNT,
            max_model_len=_COUNT,
            tokens=_COUNTS,
            token_strs={"type": ["array", "null"], "items": _TEXT},
        ),
        "Text": _object(prompt=_TEXT),
        "Cancelled": _object(
            id=_TEXT,
            object={"const": "stream"},
            cancelled={"type": "boolean"},
            jobs=_many(_object(id=_TEXT, outcome=_TEXT), minItems=1),
        ),
        "Event": {
            "type": "object",
            "description": "One server-sent event of the stream: its id is where to resume; its "
            "data is a chunk of the response, an error, or [DONE].",
            "required": ["data"],
            "properties": {"id": _TEXT, "data": _TEXT},
        },
        "Status": _object(status=_TEXT),
        "Version": _object(version=_TEXT),
    }
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a successful operation answers with: JSON of a shape, server-sent events, or either."""

    shape: str | None
    is_stream: bool = False

    def content(self) -> dict[str, Any]:
        """Return the `content` of the response."""
        content: dict[str, Any] = {}
        if self.shape is not None:
            content["application/json"] = {"schema": _ref(self.shape)}
        if self.is_stream:
            content["text/event-stream"] = {"schema": _ref("Event")}
        return content


#: Answers by method and path.
ANSWERS: Final[Mapping[tuple[str, str], Answer]] = MappingProxyType(
    {
        ("post", "/v1/completions"): Answer("Completion", is_stream=True),
        ("post", "/v1/chat/completions"): Answer("ChatCompletion", is_stream=True),
        ("get", "/v1/streams/{stream_id}"): Answer(None, is_stream=True),
        ("delete", "/v1/streams/{stream_id}"): Answer("Cancelled"),
        ("post", "/tokenize"): Answer("Tokens"),
        ("post", "/detokenize"): Answer("Text"),
        ("get", "/v1/models"): Answer("Models"),
        ("get", "/v1/models/{model}"): Answer("Model"),
        ("get", "/livez"): Answer("Status"),
        ("get", "/readyz"): Answer("Status"),
        ("get", "/health"): Answer("Status"),
        ("get", "/version"): Answer("Version"),
    }
)
