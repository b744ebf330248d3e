"""What lies around every route, as plain ASGI: request ids, log lines, keys, the last resort."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any, Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferq.producer.gateway.admission.keys import KeyRing
from inferq.producer.gateway.error_response import error_response
from inferq.producer.gateway.errors import HttpError, to_http_error

access_logger = structlog.get_logger("inferq.gateway.access")

#: Paths that need no key: health, the pages, and what these load.
PUBLIC_PATHS: Final = frozenset(
    {
        *("/", "/status", "/docs", "/openapi.json", "/favicon.ico"),
        *("/health", "/livez", "/readyz", "/metrics", "/version"),
    }
)
PUBLIC_PREFIX: Final = "/static/"
#: Paths that the status page asks for every second.
STATUS_PREFIX: Final = "/status/"

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,200}")


class RequestContext:
    """Names each request, logs it when it is over, and answers what nobody else caught.

    The name is the caller's `X-Request-Id` where it is one, and is sent back.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; see the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = name
        status = 0
        started = time.monotonic()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=name):
            try:
                await self._app(scope, receive, send_named)
            except Exception as error:  # noqa: BLE001 - the last resort
                answer = to_http_error(error)
                if not status:
                    await error_response(answer)(scope, receive, send_named)
            finally:
                _log(scope, status, time.monotonic() - started)
                structlog.contextvars.unbind_contextvars("job_id")


class KeyCheck:
    """Lets a request in whose key is known, and says as `request.state.access` what it may do."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; see the ASGI specification."""
        if scope["type"] == "http" and not is_public(scope["path"]):
            try:
                access = self._keys.authenticate(Headers(scope=scope))
            except HttpError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["access"] = access
        await self._app(scope, receive, send)


def is_public(path: str) -> bool:
    """Whether a path needs no key."""
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX)


def is_quiet(path: str) -> bool:
    """Whether requests for a path are nothing to tell of: programs make them all the time."""
    return is_public(path) or path.startswith(STATUS_PREFIX)


def _log(scope: Scope, status: int, seconds: float) -> None:
    path: str = scope["path"]
    log = access_logger.debug if is_quiet(path) else access_logger.info
    access: Any = scope["state"].get("access")
    log(
        "request",
        method=scope["method"],
        path=path[:256],  # never the query, which may hold what should have been a header
        status=status,
        key=None if access is None else access.key_id,
        milliseconds=round(seconds * 1000, 1),
    )
