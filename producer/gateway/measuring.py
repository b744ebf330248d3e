"""Counts every request as plain ASGI, from around all else: status, bytes, the first byte."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferq.producer.gateway.errors import CLIENT_GONE
from inferq.producer.gateway.methods import METHODS
from inferq.producer.gateway.metrics import HttpBooks
from inferq.producer.gateway.route_names import RouteNames

#: Paths whose time to the first byte is told.
_TIMED: Final = "/v1/"
_STREAM: Final = b"text/event-stream"


class Measuring:
    """Counts requests in `books`, under the names of `routes`."""

    def __init__(self, app: ASGIApp, books: HttpBooks, routes: RouteNames) -> None:
        self._app = app
        self._books = books
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; see the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = self._routes.find(scope["path"])
        request = _Request(self._books, route, receive, send)
        self._books.in_flight += 1
        try:
            await self._app(scope, request.receive, request.send)
        finally:
            self._books.in_flight -= 1
            self._books.streams_open -= request.is_stream
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._books.requests[route, method, str(request.status or CLIENT_GONE)] += 1


class _Request:
    """What passes of one request."""

    def __init__(self, books: HttpBooks, route: str, receive: Receive, send: Send) -> None:
        self.status = 0
        self.is_stream = False
        self._books = books
        self._route = route
        self._receive = receive
        self._send = send
        self._started = time.monotonic()
        self._awaits_body = route.startswith(_TIMED)

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._books.request_bytes += len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._awaits_body &= self.status == 200
            self.is_stream = _is_stream(message.get("headers", ()))
            self._books.streams_open += self.is_stream
        elif (body := message.get("body")) and message["type"] == "http.response.body":
            if self._awaits_body:
                self._awaits_body = False
                self._books.began_body(self._route, time.monotonic() - self._started)
            self._books.response_bytes += len(body)
        await self._send(message)


def _is_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    kinds = (value for name, value in headers if name == b"content-type")
    return any(value.startswith(_STREAM) for value in kinds)
