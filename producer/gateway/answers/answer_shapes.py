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
_NUMBER: Final = {"type": "number", "minimum": 0}
_NUMBERS: Final = {"type": "array", "items": _NUMBER}
_MAYBE_NUMBER: Final = {"type": ["number", "null"], "minimum": 0}
_WHOLE: Final = {"type": "integer"}
_COUNTS: Final = {"type": "array", "items": _COUNT}
_MAYBE_COUNT: Final = {"type": ["integer", "null"], "minimum": 0}


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

_BATCH: Final = _object(
    id=_TEXT,
    object={"const": "batch"},
    endpoint=_TEXT,
    model=_MAYBE_TEXT,
    errors=_MAYBE_OBJECT,
    input_file_id=_TEXT,
    completion_window=_TEXT,
    status={
        "enum": [
            *("validating", "failed", "in_progress", "finalizing", "completed", "expired"),
            *("cancelling", "cancelled"),
        ]
    },
    output_file_id=_MAYBE_TEXT,
    error_file_id=_MAYBE_TEXT,
    created_at=_COUNT,
    expires_at=_COUNT,
    **dict.fromkeys(
        (
            *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at"),
            *("cancelling_at", "cancelled_at"),
        ),
        _MAYBE_COUNT,
    ),
    request_counts=_object(total=_COUNT, completed=_COUNT, failed=_COUNT),
    usage=_object(
        input_tokens=_COUNT,
        input_tokens_details=_object(cached_tokens=_COUNT),
        output_tokens=_COUNT,
        output_tokens_details=_object(reasoning_tokens=_COUNT),
        total_tokens=_COUNT,
    ),
    metadata={"type": ["object", "null"], "additionalProperties": _TEXT},
)


def _page(name: str) -> dict[str, Any]:
    """Return the schema of one page of a list."""
    return _object(
        object={"const": "list"},
        data=_many(_ref(name)),
        first_id=_MAYBE_TEXT,
        last_id=_MAYBE_TEXT,
        has_more={"type": "boolean"},
    )


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
        "File": _object(
            id=_TEXT,
            object={"const": "file"},
            bytes=_COUNT,
            created_at=_COUNT,
            expires_at=_MAYBE_COUNT,
            filename=_TEXT,
            purpose=_TEXT,
            status={"enum": ["uploaded", "processed", "error"]},
            status_details=_MAYBE_TEXT,
        ),
        "Files": _page("File"),
        "FileDeleted": _object(id=_TEXT, object={"const": "file"}, deleted={"type": "boolean"}),
        "Batch": _BATCH,
        "Batches": _page("Batch"),
        "Queues": _object(
            object={"const": "status"}, interval_s=_NUMBER, queues=_many(_ref("Queue"))
        ),
        "Queue": _object(
            queue=_TEXT,
            is_reached={"type": "boolean"},
            now={"oneOf": [_ref("QueueNow"), {"type": "null"}]},
            history=_object(
                **dict.fromkeys(
                    ("time", "high", "normal", "low", "taken", "prompt", "generated"), _NUMBERS
                )
            ),
            workers=_many(_ref("Worker")),
        ),
        "QueueNow": _object(
            time=_NUMBER,
            lanes=_object(
                **dict.fromkeys(
                    ("high", "normal", "low"),
                    _object(waiting=_COUNT, taken=_COUNT, oldest_s=_MAYBE_NUMBER),
                )
            ),
            oldest_s=_MAYBE_NUMBER,
            **dict.fromkeys(
                (
                    *("queued", "running", "delayed", "left_behind", "dead_letters"),
                    *("prompt_tokens_outstanding", "budget_tokens_outstanding"),
                ),
                _WHOLE,
            ),
        ),
        "Worker": _object(
            name=_TEXT,
            partition=_COUNT,
            state={"enum": ["serving", "draining", "late", "gone"]},
            age_s=_NUMBER,
            model=_TEXT,
            adapters=_many(_TEXT),
            version=_TEXT,
            **dict.fromkeys(
                (
                    *("running", "waiting", "swapped", "preemptions", "blocks", "free_blocks"),
                    *("cached_blocks", "peak_blocks", "swap_blocks", "used_swap_blocks"),
                    *("block_size", "max_model_len", "prompt_tokens", "generated_tokens"),
                ),
                _COUNT,
            ),
            prompt_rate=_NUMBER,
            generated_rate=_NUMBER,
        ),
        "Blocks": _object(
            object={"const": "blocks"},
            queue=_TEXT,
            partition=_COUNT,
            worker=_TEXT,
            snapshot={"oneOf": [_ref("BlockSnapshot"), {"type": "null"}]},
        ),
        "BlockSnapshot": _object(
            states=_many(_TEXT),
            counts={"type": "object", "additionalProperties": _COUNT},
            blocks=_COUNT,
            host_blocks=_COUNT,
            runs=_COUNTS,
            sequences=_many(_object(job=_TEXT, index=_COUNT, tokens=_COUNT)),
        ),
        "Status": _object(status=_TEXT),
        "Version": _object(version=_TEXT),
    }
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a successful operation answers with: JSON of a shape, server-sent events, or bytes."""

    shape: str | None
    is_stream: bool = False
    is_file: bool = False

    def content(self) -> dict[str, Any]:
        """Return the `content` of the response."""
        content: dict[str, Any] = {}
        if self.shape is not None:
            content["application/json"] = {"schema": _ref(self.shape)}
        if self.is_stream:
            content["text/event-stream"] = {"schema": _ref("Event")}
        if self.is_file:
            schema = {"type": "string", "format": "binary"}
            content["application/octet-stream"] = {"schema": schema}
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
        ("post", "/v1/files"): Answer("File"),
        ("get", "/v1/files"): Answer("Files"),
        ("get", "/v1/files/{file_id}"): Answer("File"),
        ("get", "/v1/files/{file_id}/content"): Answer(None, is_file=True),
        ("delete", "/v1/files/{file_id}"): Answer("FileDeleted"),
        ("post", "/v1/batches"): Answer("Batch"),
        ("get", "/v1/batches"): Answer("Batches"),
        ("get", "/v1/batches/{batch_id}"): Answer("Batch"),
        ("post", "/v1/batches/{batch_id}/cancel"): Answer("Batch"),
        ("get", "/status/queues"): Answer("Queues"),
        ("get", "/status/blocks"): Answer("Blocks"),
        ("get", "/livez"): Answer("Status"),
        ("get", "/readyz"): Answer("Status"),
        ("get", "/health"): Answer("Status"),
        ("get", "/version"): Answer("Version"),
    }
)
