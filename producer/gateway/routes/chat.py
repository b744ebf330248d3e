"""`POST /v1/chat/completions`: the next turn of a conversation."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from inferq.producer.gateway.answers.responding import find_model, respond
from inferq.producer.gateway.gateway import Gateway
from inferq.producer.gateway.requests.body import read_body, request_body
from inferq.producer.gateway.requests.chat import ask_chat
from inferq.producer.gateway.requests.schemas import ChatBody

router = APIRouter(tags=["generation"])


@router.post(
    "/v1/chat/completions",
    summary="Go on with a conversation",
    response_model=None,
    openapi_extra=request_body(ChatBody),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer in OpenAI's shape, or as server-sent events with `stream`."""
    gateway: Gateway = request.app.state.gateway
    body = await read_body(request, ChatBody)
    served = find_model(request, body.model)
    return await respond(request, body, served, ask_chat(body, served.model, gateway.settings))
