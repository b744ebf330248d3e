"""Request bodies, read within limits and parsed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from inferq.producer.gateway.errors import SERVER, BadRequest, HttpError, retry_after
from inferq.producer.gateway.requests.parsing import parse_object, validate

#: Longest time in seconds for a body to arrive.
READ_TIMEOUT_S: Final = 60.0

M = TypeVar("M", bound=BaseModel)


class BodyMemory:
    """How many bytes of bodies may be held at once by the requests that are being read."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[_Reservation]:
        """Give back at the end what was reserved for one body."""
        reservation = _Reservation(self)
        try:
            yield reservation
        finally:
            self._held -= reservation.size

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return self._held

    def take(self, size: int) -> None:
        """Reserve bytes; raise a 503 when there are none left."""
        if self._held + size > self._limit:
            raise HttpError(
                503,
                "The gateway is reading too many large requests. Try again.",
                type=SERVER,
                code="overloaded",
                headers=retry_after(1),
            )
        self._held += size


class _Reservation:
    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.size = 0

    def grow(self, size: int) -> None:
        self._memory.take(size)
        self.size += size


async def read_body(request: Request, model: type[M]) -> M:
    """Return the request's body as a model.

    Raises 413 for one that is too long, 408 for one that does not come, 415 for one that is no JSON
    or compressed, and 400, which names the field, for one that is not what the model says.
    """
    settings, memory = request.app.state.gateway.settings, request.app.state.gateway.bodies
    async with memory.reading() as reservation:
        body = await _read(request, settings.max_body_bytes, reservation)
        return validate(parse_object(body), model)


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return a route's `openapi_extra` that shows the model as its body."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def refuse_encoding(request: Request) -> None:
    """Raise a 415 for a body that is compressed."""
    encoding = request.headers.get("content-encoding", "identity").strip()
    if encoding.lower() not in ("", "identity"):
        raise HttpError(
            415,
            f"Content-Encoding: {encoding[:80]!r} is not supported, bodies come as they are.",
            param="Content-Encoding",
            headers={"Accept-Encoding": "identity"},
        )


async def _read(request: Request, limit: int, reservation: _Reservation) -> bytes:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if kind.lower() != "application/json":
        raise HttpError(415, f"The body must be application/json, not {kind[:80]!r}.")
    refuse_encoding(request)
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > limit:
        raise _too_long(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise _too_long(limit)
                reservation.grow(len(chunk))
                body += chunk
    except TimeoutError:
        raise HttpError(408, f"The body did not arrive within {READ_TIMEOUT_S:.15g} s.") from None
    except ClientDisconnect:
        raise BadRequest("The client went away before its request was complete.") from None
    return bytes(body)


def _too_long(limit: int) -> HttpError:
    return HttpError(413, f"The body is longer than {limit} bytes.", code="request_too_large")
