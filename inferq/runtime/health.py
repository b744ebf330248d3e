"""The health port: answers probes, and who asks for metrics, over plain HTTP/1.1."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Final, Self

from inferq.protocol.errors import InvalidRequestError

#: Seconds within which a client must have sent its request and taken the answer.
REQUEST_TIMEOUT_S: Final = 5.0
#: Bytes that a request line and its headers may have.
MAX_HEAD_BYTES: Final = 8192
#: Connections served at once; more are closed unanswered.
MAX_CONNECTIONS: Final = 64

_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}

#: Says why a check fails; None when all is well.
Check = Callable[[], str | None]
#: Given what the client accepts, returns the type and the bytes of a text.
Page = Callable[[str], Awaitable[tuple[str, bytes]]]

_PLAIN: Final = "text/plain; charset=utf-8"


class HealthServer:
    """Serves `checks` by path while it is entered: 200 when one passes, 503 and why when not.

    `pages` are answered with their text. Listens on `port` (0: any free one, see `port`) of `host`,
    which is every address when None. Entering raises `InvalidRequestError`, which names `setting`,
    for a port or address that cannot be had.
    """

    def __init__(
        self,
        checks: Mapping[str, Check],
        *,
        port: int,
        host: str | None = None,
        pages: Mapping[str, Page] | None = None,
        setting: str = "health_port",
    ) -> None:
        self._checks = dict(checks)
        self._pages = dict(pages or {})
        self._host = host
        self._port = port
        self._setting = setting
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The port listened on."""
        return self._port

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(
                self._accept, self._host, self._port, limit=MAX_HEAD_BYTES
            )
        except (OSError, OverflowError) as error:
            where = f"{self._host or 'all addresses'}, port {self._port}"
            raise InvalidRequestError(
                f"cannot listen on {where}: {error}", field=self._setting
            ) from None
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request; a client that breaks off or dawdles gets no answer."""
        try:
            with contextlib.suppress(TimeoutError, OSError, EOFError):
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    writer.write(await self._respond(reader))
                    await writer.drain()
        finally:
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(400, f"more than {MAX_HEAD_BYTES} bytes of headers")
        match head.split(b"\r\n", 1)[0].split(b" "):
            case [b"GET" | b"HEAD" as method, target, version] if version.startswith(b"HTTP/1."):
                answer = await self._answer(target.split(b"?", 1)[0], _accept(head))
                return _response(*answer, with_body=method == b"GET")
            case [_, _, version] if version.startswith(b"HTTP/"):
                return _response(405, "only GET and HEAD")
        return _response(400, "not an HTTP/1.1 request")

    async def _answer(self, target: bytes, accept: str) -> tuple[int, str | bytes, str]:
        """Return status, body and its type."""
        path = target.decode("ascii", "replace")
        if (page := self._pages.get(path)) is not None:
            kind, body = await page(accept)
            return 200, body, kind
        check = self._checks.get(path)
        if check is None:
            return 404, f"there are {', '.join((*self._checks, *self._pages))}", _PLAIN
        why = check()
        return (200, "ok", _PLAIN) if why is None else (503, why, _PLAIN)


def _accept(head: bytes) -> str:
    """Return what the client accepts; of several headers of that name, the last."""
    accept = ""
    for line in head.decode("ascii", "replace").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "accept":
            accept = value.strip()
    return accept


def _response(
    status: int, content: str | bytes, kind: str = _PLAIN, *, with_body: bool = True
) -> bytes:
    body = f"{content}\n".encode() if isinstance(content, str) else content
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
        *(["Allow: GET, HEAD"] if status == 405 else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + (body if with_body else b"")
