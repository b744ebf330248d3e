"""Routes of OpenAI's that this gateway does not have: each says so, instead of a bare 404."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fastapi import APIRouter, Request, Response

from inferq.producer.gateway.errors import HttpError
from inferq.producer.gateway.methods import METHODS

_TEXT_ONLY: Final = "the workers serve models that generate text"
_CHAT_INSTEAD: Final = "use /v1/chat/completions"
#: First part of the path after /v1/, what it is called, and why not, or what instead.
REFUSED: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "assistants": ("Assistants", _CHAT_INSTEAD),
        "audio": ("Audio", _TEXT_ONLY),
        "embeddings": ("Embeddings", _TEXT_ONLY),
        "fine_tuning": ("Fine-tuning", _TEXT_ONLY),
        "images": ("Images", _TEXT_ONLY),
        "moderations": ("Moderations", _TEXT_ONLY),
        "realtime": ("The Realtime API", _CHAT_INSTEAD),
        "rerank": ("Reranking", _TEXT_ONLY),
        "responses": ("The Responses API", _CHAT_INSTEAD),
        "score": ("Scoring", _TEXT_ONLY),
        "threads": ("Threads", _CHAT_INSTEAD),
        "uploads": ("Uploads in parts", "use /v1/files"),
        "vector_stores": ("Vector stores", _TEXT_ONLY),
    }
)

router = APIRouter(include_in_schema=False)


async def refuse(request: Request) -> Response:
    """Answer with a 404 that says what is not supported."""
    name, hint = REFUSED[request.url.path.split("/")[2]]
    raise HttpError(404, f"Not supported: {name} ({hint}).", code="unsupported_endpoint")


for _kind in REFUSED:
    for _path in (f"/v1/{_kind}", f"/v1/{_kind}/{{rest:path}}"):
        router.add_api_route(_path, refuse, methods=sorted(METHODS))
