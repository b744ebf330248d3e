"""Uploads: a file's bytes go where they are kept as they come; the fields beside it are read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol

from starlette.requests import ClientDisconnect, Request

from inferq.producer.gateway.errors import BadRequest, HttpError
from inferq.producer.gateway.requests.body import READ_TIMEOUT_S, refuse_encoding
from inferq.producer.gateway.requests.multipart import MultipartReader, Part, PartEnd, Piece

#: What a file can be for.
PURPOSE: Final = "batch"
#: Most bytes of a body beside its file: boundaries, headers, fields.
MAX_FORM_BYTES: Final = 64 * 2**10
MAX_FIELD_BYTES: Final = 1024
#: Bytes of a file that are gathered before they are written.
WRITE_BYTES: Final = 256 * 2**10
MAX_FILENAME_BYTES: Final = 255
#: Longest time in seconds for a whole file to arrive.
UPLOAD_TIMEOUT_S: Final = 3600.0
#: Seconds that a file may be asked to be kept for.
EXPIRY_RANGE_S: Final = (3600, 2_592_000)

_FILE: Final = "file"
_ANCHOR: Final = "expires_after[anchor]"
_SECONDS: Final = "expires_after[seconds]"
_FIELDS: Final = ("purpose", _ANCHOR, _SECONDS)


class Sink(Protocol):
    """Where the bytes of a file go."""

    async def write(self, data: bytes) -> None:
        """Take the next bytes."""


@dataclass(frozen=True, slots=True)
class Upload:
    """What came besides the bytes."""

    filename: str
    num_bytes: int
    #: Seconds from now to keep it; None where the caller does not say.
    expires_after_s: int | None


async def read_upload(request: Request, sink: Sink, *, limit: int) -> Upload:
    """Read a form whose file goes to `sink`; a file has `limit` bytes at most.

    Raises 413 for one that is too long, 408 for one that does not come, 415 and 400 for what is no
    form, or not the right one; `sink` has had bytes of the file by then.
    """
    refuse_encoding(request)
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > limit + MAX_FORM_BYTES:
        raise too_long(limit)
    reader = MultipartReader(request.headers.get("content-type", ""))
    form = _Form(sink, limit)
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            async for chunk in _chunks(request, limit + MAX_FORM_BYTES):
                for piece in reader.feed(chunk):
                    await form.take(piece)
    except TimeoutError:
        raise HttpError(
            408,
            f"The file did not arrive within {UPLOAD_TIMEOUT_S:.15g} s, or nothing of it in "
            f"{READ_TIMEOUT_S:.15g} s.",
        ) from None
    except ClientDisconnect:
        raise BadRequest("The client went away before its request was complete.") from None
    reader.finish()
    return form.finish()


def too_long(limit: int) -> HttpError:
    """Return the error for a file of more than `limit` bytes."""
    return HttpError(
        413, f"The file is longer than {limit} bytes.", param=_FILE, code="request_too_large"
    )


async def _chunks(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Yield the body; raise `TimeoutError` when it stops coming, a 413 when it does not end."""
    stream = aiter(request.stream())
    size = 0
    while True:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        size += len(chunk)
        if size > limit:
            raise too_long(limit - MAX_FORM_BYTES)
        yield chunk


class _Form:
    """What has come of the form."""

    def __init__(self, sink: Sink, limit: int) -> None:
        self._sink = sink
        self._limit = limit
        self._part = Part("", None)
        self._value = b""
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._num_bytes = 0
        self._gathered = bytearray()

    async def take(self, piece: Piece) -> None:
        """Take what comes next."""
        match piece:
            case Part():
                self._begin(piece)
            case PartEnd() if self._part.name == _FILE:
                await self._write()
            case PartEnd():
                self._end_field(self._part.name)
            case _ if self._part.name == _FILE:
                await self._take_bytes(piece)
            case _:
                self._value += piece
                if len(self._value) > MAX_FIELD_BYTES:
                    name = self._part.name
                    raise BadRequest(f"{name}: is longer than {MAX_FIELD_BYTES} bytes", param=name)

    def finish(self) -> Upload:
        """Return what came, which must be all that there has to be."""
        if "purpose" not in self._fields:
            raise _missing("purpose")
        if self._filename is None:
            raise _missing(_FILE)
        if not self._num_bytes:
            raise BadRequest("The file is empty.", param=_FILE)
        return Upload(self._filename, self._num_bytes, self._expires_after_s())

    async def _take_bytes(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > self._limit:
            raise too_long(self._limit)
        self._gathered += piece
        if len(self._gathered) >= WRITE_BYTES:
            await self._write()

    async def _write(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        if gathered:
            await self._sink.write(bytes(gathered))

    def _begin(self, part: Part) -> None:
        if part.name == _FILE:
            if self._filename is not None:
                raise BadRequest("The body has more than one file.", param=_FILE)
            self._filename = _checked_filename(part.filename)
        elif part.name not in _FIELDS:
            name = part.name[:80]
            raise BadRequest(f"Unknown parameter: {name!r}", param=name, code="unknown_parameter")
        elif part.filename is not None:
            raise BadRequest(f"{part.name}: is a text, not a file", param=part.name)
        elif part.name in self._fields:
            raise BadRequest(f"The body has {part.name!r} twice.", param=part.name)
        self._part, self._value = part, b""

    def _end_field(self, name: str) -> None:
        try:
            value = self._value.decode()
        except UnicodeDecodeError:
            raise BadRequest(f"{name}: is not valid UTF-8", param=name) from None
        if name == "purpose" and value != PURPOSE:
            raise BadRequest(
                f"purpose: {value[:80]!r} is not supported; files are for {PURPOSE!r} only",
                param=name,
            )
        self._fields[name] = value

    def _expires_after_s(self) -> int | None:
        anchor, seconds = self._fields.get(_ANCHOR), self._fields.get(_SECONDS)
        if anchor is None and seconds is None:
            return None
        if anchor != "created_at":
            raise BadRequest(f"{_ANCHOR}: must be 'created_at'", param=_ANCHOR)
        low, high = EXPIRY_RANGE_S
        given = seconds or ""
        value = int(given) if given.isascii() and given.isdigit() and len(given) < 16 else 0
        if not low <= value <= high:
            raise BadRequest(f"{_SECONDS}: must be from {low} to {high}", param=_SECONDS)
        return value


def _checked_filename(filename: str | None) -> str:
    if filename is None:
        raise BadRequest("file: must be a file, with a filename", param=_FILE)
    if not 1 <= len(filename.encode()) <= MAX_FILENAME_BYTES or not filename.isprintable():
        raise BadRequest(
            f"file: its name must have 1 to {MAX_FILENAME_BYTES} bytes, all of them printable",
            param=_FILE,
        )
    return filename


def _missing(name: str) -> BadRequest:
    return BadRequest(
        f"Missing required parameter: {name!r}", param=name, code="missing_required_parameter"
    )
