"""What a request for a batch, and the form of an upload, may hold."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from inferq.producer.gateway.requests.schemas import Body
from inferq.producer.gateway.requests.upload import EXPIRY_RANGE_S, PURPOSE

MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class OutputExpiry(Body):
    """When the files that a batch makes expire."""

    anchor: Literal["created_at"]
    seconds: int = Field(
        ge=EXPIRY_RANGE_S[0],
        le=EXPIRY_RANGE_S[1],
        description="Seconds after the file was made.",
    )


class BatchBody(Body):
    """The body of `POST /v1/batches`."""

    input_file_id: str = Field(min_length=1, max_length=128, description="An uploaded file.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"] = Field(description="How long the batch may take.")
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)
    output_expires_after: OutputExpiry | None = None


_FORM: Final[dict[str, Any]] = {
    "title": "FileForm",
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "Requests, one a line."},
        "purpose": {"enum": [PURPOSE]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": EXPIRY_RANGE_S[0],
            "maximum": EXPIRY_RANGE_S[1],
        },
    },
}


def upload_form() -> dict[str, Any]:
    """Return a route's `openapi_extra` that shows the form of an upload as its body."""
    content = {"multipart/form-data": {"schema": dict(_FORM)}}
    return {"requestBody": {"required": True, "content": content}}
