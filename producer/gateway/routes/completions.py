"""`POST /v1/completions`: text that goes on where prompts end."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from inferq.producer.gateway.answers.responding import find_model, respond
from inferq.producer.gateway.gateway import Gateway
from inferq.producer.gateway.requests.body import read_body, request_body
from inferq.producer.gateway.requests.completion import ask_completion
from inferq.producer.gateway.requests.schemas import CompletionBody

router = APIRouter(tags=["generation"])


@router.post(
    "/v1/completions",
    summary="Complete prompts",
    response_model=None,
    openapi_extra=request_body(CompletionBody),
)
async def create_completion(request: Request) -> Response:
    """Answer in OpenAI's shape, or as server-sent events with `stream`."""
    gateway: Gateway = request.app.state.gateway
    body = await read_body(request, CompletionBody)
    served = find_model(request, body.model)
    asked = ask_completion(body, served.model, gateway.settings)
    return await respond(request, body, served, asked)
