"""`/v1/models`: what the live workers serve."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from inferq.producer.gateway.admission.access import Access
from inferq.producer.gateway.directory import Served
from inferq.producer.gateway.errors import ModelNotServed
from inferq.producer.gateway.gateway import Gateway

router = APIRouter(tags=["models"])


@router.get("/v1/models", summary="List the models")
async def list_models(request: Request) -> dict[str, Any]:
    """Return the models that the caller's key may use."""
    return {"object": "list", "data": [_shown(each, request) for each in _allowed(request)]}


@router.get("/v1/models/{model:path}", summary="Describe a model")
async def describe_model(request: Request, model: str) -> dict[str, Any]:
    """Return one model; a 404 lists those that there are."""
    allowed = _allowed(request)
    for served in allowed:
        if served.model == model:
            return _shown(served, request)
    raise ModelNotServed(model, [served.model for served in allowed])


def _allowed(request: Request) -> list[Served]:
    gateway: Gateway = request.app.state.gateway
    access: Access = request.state.access
    return [served for served in gateway.directory.served() if access.may_use(served.model)]


def _shown(served: Served, request: Request) -> dict[str, Any]:
    gateway: Gateway = request.app.state.gateway
    return {
        "id": served.model,
        "object": "model",
        "created": gateway.directory.first_seen_s(served.model),
        "owned_by": "inferq",
        "root": served.parent or served.model,
        "parent": served.parent,
        "max_model_len": served.max_model_len or None,
    }
