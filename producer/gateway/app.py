"""The application: routes, what lies around them, and errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from inferq.producer.gateway.error_response import error_response
from inferq.producer.gateway.errors import SHOULD_RETRY, BadRequest, HttpError
from inferq.producer.gateway.gateway import Gateway
from inferq.producer.gateway.measuring import Measuring
from inferq.producer.gateway.middleware import KeyCheck, RequestContext
from inferq.producer.gateway.requests.parsing import field_path
from inferq.producer.gateway.route_names import RouteNames
from inferq.producer.gateway.routes import (
    batches,
    chat,
    completions,
    files,
    health,
    metrics,
    models,
    openapi,
    page,
    refused,
    status,
    streams,
    tokenization,
)
from inferq.producer.gateway.settings import GatewaySettings
from inferq.producer.gateway.tracing import TraceLayer
from inferq.protocol.errors import InferqError
from inferq.version import __version__

#: Of the answers, for pages of other origins.
EXPOSED_HEADERS: Final = (
    *("X-Request-Id", "X-Inferq-Job-Id", "Retry-After", SHOULD_RETRY),
    *(f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")),
    *(f"x-ratelimit-{what}-tokens" for what in ("limit", "remaining", "reset")),
)


def create_app(settings: GatewaySettings) -> FastAPI:
    """Return the application; `app.state.gateway` is what its routes share.

    Raises `InvalidRequestError` for a setting that cannot be used, such as a bad file of keys.
    """
    gateway = Gateway.build(settings)
    routers = _routers(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    app = FastAPI(
        title="inferq gateway",
        version=__version__,
        summary="OpenAI's API in front of a queue of inference jobs.",
        lifespan=lifespan,
        middleware=_middleware(gateway, RouteNames(routers, refused=refused.router)),
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; `openapi` has one of its own
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    for router in (*routers, refused.router):
        app.include_router(router)
    for kind, handler in (
        (HttpError, _on_error),
        (InferqError, _on_error),
        (HTTPException, _on_http_exception),
        (RequestValidationError, _on_validation_error),
    ):
        app.add_exception_handler(kind, handler)
    return app


def _routers(settings: GatewaySettings) -> list[APIRouter]:
    """Return all routes but those that are refused."""
    modules = (
        *(completions, chat, files, batches, streams),
        *(tokenization, models, health, status, openapi),
    )
    routers = [module.router for module in modules]
    if settings.metrics_port is None:
        routers.append(metrics.router)
    return [*routers, page.page_router()]


def _middleware(gateway: Gateway, routes: RouteNames) -> list[Middleware]:
    layers = [Middleware(Measuring, books=gateway.metrics.books, routes=routes)]
    if gateway.tracing is not None:
        layers.append(Middleware(TraceLayer, tracing=gateway.tracing))
    layers.append(Middleware(RequestContext))
    if gateway.settings.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=gateway.settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
            )
        )
    return [*layers, Middleware(KeyCheck, keys=gateway.keys)]


async def _on_error(request: Request, error: Exception) -> Response:
    gateway: Gateway = request.app.state.gateway
    answer = gateway.to_http_error(error)
    gateway.metrics.books.refused(answer)
    return error_response(answer)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer for what the router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:256]}"
    if error.status_code == 404:
        message, code = f"Unknown request URL: {where}.", "unknown_url"
    elif error.status_code == 405:
        message, code = f"Method not allowed: {where}.", "method_not_allowed"
    else:
        message, code = str(error.detail), None
    return error_response(
        HttpError(error.status_code, message, code=code, headers=error.headers or {})
    )


async def _on_validation_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """Answer for parameters of path and query that FastAPI refuses."""
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    name = field_path(problem["loc"][1:])
    return error_response(BadRequest(f"{name}: {problem['msg']}", param=name or None))
