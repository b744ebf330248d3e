"""A stream of server-sent events as an answer: it begins with the first event, or as an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferq.producer.gateway.answers.event_writer import DONE
from inferq.producer.gateway.error_response import error_response
from inferq.producer.gateway.errors import SERVER, HttpError, retry_after
from inferq.protocol.task_ends import end_tasks

T = TypeVar("T")

#: The last words of a gateway that ends: the stream is cut, and can be resumed where there is
#: another, which it cannot know.
GOODBYE: Final = (
    b": this gateway is ending; where there is another gateway, it goes on from Last-Event-ID\n\n"
)
#: What keeps proxies from collecting or changing the stream.
_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}


class EventStream(Response):
    """Sends what `source` yields, as fast as the client reads it.

    An error before the first event is answered with its status; a later one is an event of the
    stream, which `[DONE]` follows. When the client goes away, `on_disconnect` is called; when
    `closing` is set, the connection is cut, so that no client takes the stream for complete.
    `stack` is closed at the end, however that comes.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str],
        to_http_error: Callable[[Exception], HttpError],
        closing: asyncio.Event,
        on_disconnect: Callable[[], Awaitable[None]] | None = None,
        stack: AsyncExitStack | None = None,
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self._source = source
        self._more_headers = dict(headers)
        self._to_http_error = to_http_error
        self._closing = closing
        self._on_disconnect = on_disconnect
        self._stack = stack or AsyncExitStack()
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; see the ASGI specification."""
        async with self._stack:
            sending = asyncio.create_task(self._send(scope, receive, send))
            gone = asyncio.create_task(disconnected(receive))
            closing = asyncio.create_task(self._closing.wait())
            try:
                await asyncio.wait({sending, gone, closing}, return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    await end_tasks([sending])
                    if gone.done() and self._on_disconnect is not None:
                        await self._on_disconnect()
            finally:
                await end_tasks([sending, gone, closing])
            if not sending.cancelled():
                sending.result()
            elif gone.cancelled():  # by us: the client is still there
                await self._say_goodbye(scope, receive, send)

    async def _say_goodbye(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Leave the stream without its end, or refuse it if it has not begun."""
        if self._has_begun:
            await self._write(send, GOODBYE)
            return
        answer = HttpError(
            503,
            "This gateway is shutting down. Where there is another gateway, it can go on with the "
            "jobs of this request.",
            type=SERVER,
            code="overloaded",
            headers=retry_after(1),
        )
        answer.headers.update(self._more_headers)
        await error_response(answer)(scope, receive, send)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source) as source:
            try:
                first = await anext(source)
            except Exception as error:  # noqa: BLE001 - every error is an answer
                answer = self._to_http_error(error)
                answer.headers.update(self._more_headers)
                await error_response(answer)(scope, receive, send)
                return
            await self._begin(send)
            await self._write(send, first)
            try:
                async for piece in source:
                    await self._write(send, piece)
            except Exception as error:  # noqa: BLE001 - every error is an event
                await self._write(send, error_event(self._to_http_error(error)) + DONE)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        self._has_begun = True
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)

    async def _write(self, send: Send, piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})


def error_event(error: HttpError) -> bytes:
    """Return an error as an event."""
    return b"data: %b\n\n" % orjson.dumps(error.body)


async def disconnected(receive: Receive) -> None:
    """Return when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns; None, with `work` cancelled, when the client goes away first."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await end_tasks([working, gone])
