"""Bodies of `multipart/form-data` as they come: pieces of parts, never a whole file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from inferq.producer.gateway.errors import BadRequest, HttpError

#: Most parts of one body.
MAX_PARTS: Final = 16
#: Most bytes of one part's headers.
MAX_HEADER_BYTES: Final = 8192
#: Encodings of a part's content that change none of it.
_PLAIN_ENCODINGS: Final = frozenset({b"", b"binary", b"8bit", b"7bit"})
_MEDIA_TYPE: Final = b"multipart/form-data"


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a part; `filename` is None where it is a plain field."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartEnd:
    """The end of a part."""


#: What a body consists of: parts that begin, pieces of the part that has begun, and their ends.
Piece = Part | PartEnd | bytes


class MultipartReader:
    """Takes a body's bytes as they come and returns what they hold.

    Raises a 415 for a body of another type, and a 400 for one that is not well-formed.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        if kind != _MEDIA_TYPE:
            raise HttpError(
                415, f"The body must be multipart/form-data, not {content_type[:80]!r}."
            )
        boundary = options.get(b"boundary", b"")
        if not boundary:
            raise BadRequest("The Content-Type names no boundary of the parts.")
        self._pieces: list[Piece] = []
        self._num_parts = 0
        self._headers: dict[bytes, bytes] = {}
        self._name = b""
        self._value = b""
        self._header_bytes = 0
        self._is_whole = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError:
            raise BadRequest("The boundary of the parts is too long.") from None

    def feed(self, chunk: bytes) -> list[Piece]:
        """Return what the next bytes of the body hold."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise BadRequest(f"The body is not valid multipart/form-data: {error}.") from None
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> None:
        """Check that the body has ended where its last part has."""
        if not self._is_whole:
            raise BadRequest("The body ends before the last boundary of its parts.")

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise BadRequest(f"The body has more than {MAX_PARTS} parts.")
        self._headers = {}
        self._header_bytes = 0

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _on_headers_finished(self) -> None:
        encoding = self._headers.get(b"content-transfer-encoding", b"").strip().lower()
        if encoding not in _PLAIN_ENCODINGS:
            raise BadRequest("Content-Transfer-Encoding is not supported, parts come as they are.")
        disposition = self._headers.get(b"content-disposition", b"")
        kind, options = parse_options_header(disposition.decode("latin-1"))
        if kind != b"form-data" or b"name" not in options:
            raise BadRequest("A part of the body has no name in its Content-Disposition.")
        name = _text(options[b"name"])
        filename = options.get(b"filename")
        self._pieces.append(Part(name, None if filename is None else _text(filename)))

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._pieces.append(data[start:end])

    def _on_part_end(self) -> None:
        self._pieces.append(PartEnd())

    def _on_end(self) -> None:
        self._is_whole = True

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise BadRequest(f"A part of the body has more than {MAX_HEADER_BYTES} header bytes.")


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise BadRequest("A name in the body is not valid UTF-8.") from None
