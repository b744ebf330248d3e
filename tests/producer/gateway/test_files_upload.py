"""Uploads as they are read: any cut of the body, every fault of the form, and where bytes go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from inferq.producer.gateway.errors import HttpError
from inferq.producer.gateway.requests import upload as upload_module
from inferq.producer.gateway.requests.upload import (
    MAX_FIELD_BYTES,
    MAX_FORM_BYTES,
    Upload,
    read_upload,
)

LIMIT = 4096
TYPE = "multipart/form-data; boundary=cut"
#: Holds everything that looks like the end of a part, and is none.
CONTENT = b"\r\n--cu\r\n--cut-\r\n--\r\r\n\r\n--cutx{}\n" * 20


class Memory:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.pieces.append(data)

    @property
    def content(self) -> bytes:
        return b"".join(self.pieces)


def part(name: str, content: bytes, filename: str | None = None, headers: bytes = b"") -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    head = f'--cut\r\nContent-Disposition: form-data; name="{name}"{named}\r\n'
    return head.encode() + headers + b"\r\n" + content + b"\r\n"


PURPOSE = part("purpose", b"batch")
FILE = part("file", CONTENT, "in.jsonl")
END = b"--cut--\r\n"


def request(
    chunks: Iterable[bytes], content_type: str | None = TYPE, *, length: int | None = None
) -> Request:
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
    ]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    return request_of(messages, content_type, length=length)


def request_of(
    messages: list[dict[str, Any]], content_type: str | None = TYPE, *, length: int | None = None
) -> Request:
    headers = [] if content_type is None else [(b"content-type", content_type.encode("latin-1"))]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def read(*chunks: bytes, **options: Any) -> tuple[Upload, bytes]:
    memory = Memory()
    upload = await read_upload(request(chunks, **options), memory, limit=LIMIT)
    return upload, memory.content


async def test_a_file_arrives_whole_wherever_its_body_is_cut() -> None:
    body = PURPOSE + FILE + END
    for step in (1, 2, 3, 7, len(body)):
        chunks = [body[start : start + step] for start in range(0, len(body), step)]
        upload, content = await read(*chunks)
        assert content == CONTENT
        assert upload == Upload("in.jsonl", len(CONTENT), None)
    draw = random.Random(7)
    for _ in range(50):
        cuts = sorted(draw.sample(range(len(body)), 6))
        pairs = zip([0, *cuts], [*cuts, len(body)], strict=True)
        assert (await read(*(body[start:end] for start, end in pairs)))[1] == CONTENT


async def test_fields_may_come_after_the_file() -> None:
    expiry = part("expires_after[anchor]", b"created_at") + part("expires_after[seconds]", b"3600")
    upload, content = await read(FILE, expiry, PURPOSE, END)
    assert upload == Upload("in.jsonl", len(CONTENT), 3600)
    assert content == CONTENT


async def test_a_body_that_httpx_makes_is_read() -> None:
    made = httpx.Request(
        "POST", "http://gateway", data={"purpose": "batch"}, files={"file": ("ü 1.jsonl", b"{}\n")}
    )
    upload, content = await read(made.read(), content_type=made.headers["content-type"])
    assert (upload.filename, content) == ("ü 1.jsonl", b"{}\n")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (FILE + END, "purpose", "Missing required parameter: 'purpose'"),
        (PURPOSE + END, "file", "Missing required parameter: 'file'"),
        (END, "purpose", "Missing required parameter: 'purpose'"),
        (part("purpose", b"vision") + FILE + END, "purpose", "'vision' is not supported"),
        (part("purpose", b"\xff") + FILE + END, "purpose", "not valid UTF-8"),
        (PURPOSE + FILE + FILE + END, "file", "more than one file"),
        (PURPOSE + PURPOSE + FILE + END, "purpose", "twice"),
        (part("purpose", b"batch", "p.txt") + FILE + END, "purpose", "is a text, not a file"),
        (PURPOSE + part("file", b"{}") + END, "file", "must be a file"),
        (PURPOSE + part("file", b"{}", "") + END, "file", "1 to 255 bytes"),
        (PURPOSE + part("file", b"{}", "x" * 256) + END, "file", "1 to 255 bytes"),
        (PURPOSE + part("file", b"{}", "a\tb") + END, "file", "printable"),
        (PURPOSE + part("file", b"", "in.jsonl") + END, "file", "is empty"),
        (PURPOSE + part("user", b"me") + FILE + END, "user", "Unknown parameter: 'user'"),
        (part("purpose", b"b" * (MAX_FIELD_BYTES + 1)) + END, "purpose", "longer than 1024"),
        (PURPOSE + part("expires_after[seconds]", b"3600") + FILE + END, None, "created_at"),
        (PURPOSE + part("expires_after[anchor]", b"created_at") + FILE + END, None, "from 3600"),
        (part("file", b"", "f") + PURPOSE * 20 + END, None, "more than 16 parts|twice"),
        (PURPOSE + FILE, None, "ends before the last boundary"),
        (PURPOSE + FILE[:-400], None, "ends before the last boundary"),
        (b"", None, "ends before the last boundary"),
        (b"--other\r\n" + FILE + END, None, "not valid multipart/form-data"),
        (b"--cut\r\nbroken header\r\n\r\nx\r\n" + END, None, "not valid multipart/form-data"),
        (b"--cut\r\nContent-Type: text/plain\r\n\r\nx\r\n" + END, None, "has no name"),
        (PURPOSE + FILE.replace(b"in.jsonl", b"\xff") + END, None, "not valid UTF-8"),
        (b"--cut\r\n" + b"X: " + b"y" * 9000, None, "header"),
        (part("file", b"e30=", "in.jsonl", b"Content-Transfer-Encoding: base64\r\n") + END,
         None, "Content-Transfer-Encoding"),
    ],
)  # fmt: skip
async def test_a_form_that_is_not_right_is_a_400_that_says_how(
    body: bytes, param: str | None, message: str
) -> None:
    for step in (len(body) or 1, 5):
        chunks = [body[start : start + step] for start in range(0, len(body), step)]
        with pytest.raises(HttpError, match=message) as raised:
            await read(*chunks)
        assert raised.value.status == 400
        if param is not None:
            assert raised.value.param == param


@pytest.mark.parametrize("seconds", [b"0", b"3599", b"2592001", b"-1", b"1e6", b"9" * 400])
async def test_an_expiry_out_of_range_is_a_400(seconds: bytes) -> None:
    anchor = part("expires_after[anchor]", b"created_at")
    with pytest.raises(HttpError, match="must be from 3600 to 2592000"):
        await read(PURPOSE, anchor, part("expires_after[seconds]", seconds), FILE, END)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [(None, 415), ("application/json", 415), ("multipart/form-data", 400),
     ("multipart/form-data; boundary=", 400), (f"multipart/form-data; boundary={'x' * 300}", 400)],
)  # fmt: skip
async def test_another_kind_of_body_is_refused(content_type: str | None, status: int) -> None:
    with pytest.raises(HttpError) as raised:
        await read(PURPOSE, FILE, END, content_type=content_type)
    assert raised.value.status == status


async def test_a_file_beyond_the_limit_is_a_413_while_it_is_read() -> None:
    memory = Memory()
    taken = 0

    def endless() -> Iterable[bytes]:
        nonlocal taken
        yield (
            PURPOSE + b'--cut\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        )
        while taken < 100:
            taken += 1
            yield b"x" * 512

    messages = ({"type": "http.request", "body": each, "more_body": True} for each in endless())

    async def receive() -> dict[str, Any]:
        return next(messages)

    made = request_of([])
    made._receive = receive
    with pytest.raises(HttpError, match=f"longer than {LIMIT} bytes") as raised:
        await read_upload(made, memory, limit=LIMIT)
    assert raised.value.status == 413
    assert taken == LIMIT // 512 + 1
    assert len(memory.content) <= LIMIT


async def test_a_length_beyond_the_limit_is_a_413_before_anything_is_read() -> None:
    with pytest.raises(HttpError) as raised:
        await read(PURPOSE, length=LIMIT + MAX_FORM_BYTES + 1)
    assert raised.value.status == 413


async def test_what_follows_the_end_is_bounded_too() -> None:
    with pytest.raises(HttpError) as raised:
        await read(PURPOSE, FILE, END, *[b"x" * 8192] * 10)
    assert raised.value.status == 413


async def test_a_file_that_stops_coming_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_module, "READ_TIMEOUT_S", 0.01)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    made = request_of([])
    made._receive = receive
    with pytest.raises(HttpError, match="did not arrive") as raised:
        await read_upload(made, Memory(), limit=LIMIT)
    assert raised.value.status == 408


async def test_a_client_that_goes_away_ends_the_reading() -> None:
    sent = {"type": "http.request", "body": PURPOSE + FILE[:-100], "more_body": True}
    with pytest.raises(HttpError, match="went away"):
        await read_upload(request_of([sent, {"type": "http.disconnect"}]), Memory(), limit=LIMIT)
