"""The pages: `/` to try the gateway by hand, `/status`; of one origin with their files, no inline
code."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Final, Self

from fastapi import APIRouter, Request, Response

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
#: By file; the others are what they load.
_PATHS: Final = {"page.html": "/", "status.html": "/status"}
_HEADERS: Final = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # asked for again each time, so that a new version is never mixed with an old one
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    headers: dict[str, str]

    @classmethod
    def of(cls, name: str, content: bytes) -> Self:
        tag = hashlib.sha256(content).hexdigest()[:32]
        kind = _TYPES[name.rpartition(".")[2]]
        return cls(content, _HEADERS | {"Content-Type": kind, "ETag": f'"{tag}"'})

    def answer(self, request: Request) -> Response:
        if request.headers.get("If-None-Match") == self.headers["ETag"]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def page_router() -> APIRouter:
    """Return the routes of the pages and of `/static/…`; no key needed, the files are read now."""
    router = APIRouter(include_in_schema=False)
    for name, file in _read_files().items():
        path = _PATHS.get(name, f"/static/{name}")
        router.add_api_route(path, file.answer, methods=["GET", "HEAD"])
    return router


def _read_files() -> dict[str, _File]:
    folder = resources.files("inferq.producer.gateway.static")
    return {
        entry.name: _File.of(entry.name, entry.read_bytes())
        for entry in folder.iterdir()
        if entry.name.rpartition(".")[2] in _TYPES
    }
