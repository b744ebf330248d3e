"""`/tokenize` and `/detokenize` in vLLM's shapes: answered by workers, beside their engines."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from inferq.producer.gateway.answers.logprob_shapes import token_text
from inferq.producer.gateway.answers.responding import find_model
from inferq.producer.gateway.directory import Served
from inferq.producer.gateway.errors import BadRequest
from inferq.producer.gateway.gateway import Gateway
from inferq.producer.gateway.requests.body import read_body, request_body
from inferq.producer.gateway.requests.chat import chat_prompt
from inferq.producer.gateway.requests.schemas import DetokenizeBody, TokenizeBody
from inferq.producer.gateway.requests.submission import TOKENS_FIELD
from inferq.producer.result import TokenizedPrompt
from inferq.protocol.errors import InvalidRequestError, JobFailed

router = APIRouter(tags=["tokenization"])


@router.post("/tokenize", summary="Count tokens", openapi_extra=request_body(TokenizeBody))
async def tokenize(request: Request) -> dict[str, Any]:
    """Return the token ids of a prompt, or of a conversation as the model gets it."""
    body = await read_body(request, TokenizeBody)
    served = find_model(request, body.model)
    told = await _tokenize(request, served, _prompt(body))
    return {
        "count": len(told.token_ids),
        "max_model_len": served.max_model_len,
        "tokens": told.token_ids,
        "token_strs": (
            [token_text(raw) for raw in told.token_texts] if body.return_token_strs else None
        ),
    }


@router.post("/detokenize", summary="Text of tokens", openapi_extra=request_body(DetokenizeBody))
async def detokenize(request: Request) -> dict[str, Any]:
    """Return the text of token ids."""
    gateway: Gateway = request.app.state.gateway
    body = await read_body(request, DetokenizeBody)
    served = find_model(request, body.model)
    if not body.tokens:
        return {"prompt": ""}
    try:
        told = await _tokenize(request, served, {"prompt": body.tokens})
    except (InvalidRequestError, JobFailed) as error:
        answer = gateway.to_http_error(error)
        if answer.param == TOKENS_FIELD:
            answer.param = "tokens"
            answer.message = answer.message.replace(TOKENS_FIELD, "tokens", 1)
        raise answer from None
    return {"prompt": told.text}


def _prompt(body: TokenizeBody) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("Give either prompt or messages.", param="prompt")
    if body.messages is None:
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt"):
            if getattr(body, name) is not None:
                raise BadRequest(f"{name}: goes with messages only.", param=name)
        prompt: dict[str, Any] = {"prompt": body.prompt}
        if body.add_special_tokens is not None:
            prompt["add_special_tokens"] = body.add_special_tokens
        return prompt
    if body.add_special_tokens:
        raise BadRequest("add_special_tokens: the chat template has them.", param="messages")
    conversation = chat_prompt(body)
    if body.tools:
        conversation["tools"] = body.tools
    return conversation


async def _tokenize(request: Request, served: Served, prompt: dict[str, Any]) -> TokenizedPrompt:
    gateway: Gateway = request.app.state.gateway
    with gateway.in_flight.slot():
        async with await gateway.limiter.admit(request.state.access, streams=0):
            return await served.client.tokenize(
                model=served.model,
                timeout_s=min(60.0, gateway.settings.request_timeout_s),
                **prompt,
            )
