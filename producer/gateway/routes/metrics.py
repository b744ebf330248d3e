"""What monitoring reads, on the gateway's own port; needs no key."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from inferq.producer.gateway.gateway import Gateway

PATH = "/metrics"

router = APIRouter(include_in_schema=False)


@router.get(PATH)
async def metrics(request: Request) -> Response:
    """Return the metrics in the form that `Accept` asks for."""
    gateway: Gateway = request.app.state.gateway
    kind, text = await gateway.metrics.page.answer(request.headers.get("accept", ""))
    return Response(text, headers={"Content-Type": kind, "Cache-Control": "no-store"})
