"""Whether the gateway lives, is ready, and has workers; needs no key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from inferq.producer.gateway.gateway import Gateway
from inferq.version import __version__

router = APIRouter(tags=["health"])


@router.get("/livez", summary="Whether the process answers")
async def livez() -> dict[str, str]:
    """Answer."""
    return {"status": "ok"}


@router.get(
    "/readyz",
    summary="Whether requests should be sent here",
    responses={503: {"description": "The server is out of reach, or the gateway is ending"}},
)
async def readyz(request: Request) -> JSONResponse:
    """Say ready while the server answers and the process is not about to end."""
    gateway: Gateway = request.app.state.gateway
    if gateway.in_flight.is_ending:
        return JSONResponse({"status": "shutting down"}, 503)
    if not gateway.directory.is_current:
        return JSONResponse({"status": "server out of reach"}, 503)
    return JSONResponse({"status": "ready"})


@router.get(
    "/health",
    summary="Whether a request could be served now",
    responses={503: {"description": "No worker is alive, or the server is out of reach"}},
)
async def health(request: Request) -> JSONResponse:
    """Say ok while the server answers and a worker lives."""
    gateway: Gateway = request.app.state.gateway
    directory = gateway.directory
    state: dict[str, Any] = {"workers": directory.num_alive, "requests": len(gateway.in_flight)}
    if not directory.is_current:
        return JSONResponse({"status": "server out of reach", **state}, 503)
    if not directory.served():
        return JSONResponse({"status": "no worker is alive", **state}, 503)
    return JSONResponse({"status": "ok", **state})


@router.get("/version", summary="The version of inferq")
async def version() -> dict[str, str]:
    """Return the version."""
    return {"version": __version__}


router.add_api_route("/livez", livez, methods=["HEAD"], include_in_schema=False)
router.add_api_route("/readyz", readyz, methods=["HEAD"], include_in_schema=False)
router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)
