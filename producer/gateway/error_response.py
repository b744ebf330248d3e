"""An error as starlette's response; apart from the errors, which are made without a server too."""

from __future__ import annotations

from starlette.responses import JSONResponse

from inferq.producer.gateway.errors import HttpError


def error_response(error: HttpError) -> JSONResponse:
    """Return the error as an answer."""
    return JSONResponse(error.body, error.status, headers=error.headers)
