"""Request bodies: what is too large, too deep or no JSON is refused at once, and names why."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import hypothesis
import hypothesis.strategies
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict

from inferq.producer.gateway.app import create_app
from inferq.producer.gateway.errors import HttpError
from inferq.producer.gateway.requests import body as bodies
from inferq.producer.gateway.requests.body import read_body, request_body
from inferq.producer.gateway.requests.parsing import parse_object, validate
from inferq.producer.gateway.routes.openapi import schema_of
from inferq.producer.gateway.settings import GatewaySettings


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    size: int
    items: list[Item] = []


def refused(given: bytes) -> str:
    with pytest.raises(HttpError) as raised:
        parse_object(given)
    assert raised.value.status == 400
    assert raised.value.type == "invalid_request_error"
    return raised.value.message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"3", "must be a JSON object"),
        (b'{"a": 1,}', "not valid JSON: .* line 1, column"),
        (b'{"a": NaN}', "holds NaN"),
        (b'{"a": -Infinity}', "holds -Infinity"),
        (b'{"a": 1e999}', "holds 1e999"),
        (b'{"a": 1, "b": {"x": 1, "x": 2}}', "names 'x' twice"),
        (b'{"a": "\xff"}', r"not valid UTF-8 \(byte 7\)"),
        (b'{"a": "\\ud800"}', "half a character"),
        (b'{"a": "\\uDC00"}', "half a character"),
        (b'{"\\ud800": 1}', "half a character"),
        (b'{"a": ' + b"9" * 5000 + b"}", "number that is too long"),
        (b'{"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "nested deeper than 64"),
        (b'{"a": ' * 65 + b"1" + b"}" * 65, "nested deeper than 64"),
        (b"[" * 5_000_000, "more than 2097152 values"),
        (b'{"a": [' + b"1," * 3_000_000 + b"1]}", "more than 2097152 values"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
def test_what_is_no_json_object_is_refused(given: bytes, message: str) -> None:

    assert re.search(message, refused(given))


@pytest.mark.parametrize(
    "given",
    [
        {"a": "[{," * 100_000},
        {"a": '\\"[' * 100_000},
        {"a": "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")},
        {"a": list(range(500_000))},
        {"a": [[1, 2]] * 2048},
    ],
    ids=["brackets in text", "escapes", "emoji", "a million ids", "many prompts"],
)
def test_what_only_looks_deep_or_large_is_read(given: dict[str, Any]) -> None:
    assert parse_object(json.dumps(given).encode()) == given


def test_strings_that_never_end_cost_one_pass() -> None:
    started = time.process_time()
    for piece in (b'"\\"', b'\\"', b'"', b"\\"):
        refused(b"[" * 100 + piece * (4_000_000 // len(piece)))
    assert time.process_time() - started < 10  # a pass for each quote would take days


@hypothesis.given(hypothesis.strategies.binary(max_size=200))
@hypothesis.example(b'{"a": "\\ud83d\\ude00"}')
@hypothesis.example(b'{"a": 1E400}')
@hypothesis.example(b"\xef\xbb\xbf{}")
def test_any_bytes_are_an_object_or_refused(given: bytes) -> None:
    for wrapped in (given, b'{"a": ' + given + b"}", b'{"a": "' + given + b'"}'):
        try:
            result: object = parse_object(wrapped)
        except HttpError as error:
            result = error
        assert isinstance(result, dict) or getattr(result, "status", None) == 400


def test_the_first_wrong_field_is_named() -> None:
    with pytest.raises(HttpError) as raised:
        validate({"size": "x", "items": [{"name": "a"}, {"name": 3}]}, Order)
    assert raised.value.param == "size"
    assert "items[1].name: Input should be a valid string" in raised.value.message
    with pytest.raises(HttpError) as raised:
        validate({"size": 1, "items": [{"name": "a", "nope": 1}]}, Order)
    assert raised.value.param == "items[0].nope"
    assert raised.value.code == "unknown_parameter"
    assert raised.value.message == "Unknown parameter: 'items[0].nope'"
    with pytest.raises(HttpError) as raised:
        validate({}, Order)
    assert raised.value.code == "missing_required_parameter"
    assert raised.value.param == "size"


def test_many_wrong_fields_make_a_short_message() -> None:
    with pytest.raises(HttpError) as raised:
        validate({"size": 1, "items": [{"name": k} for k in range(1000)]}, Order)
    assert "and 997 more" in raised.value.message
    assert len(raised.value.message) < 500


@pytest.fixture
def make_app(valkey_url: str, queue: str) -> Callable[..., FastAPI]:
    def make(**settings: Any) -> FastAPI:
        given = {"redis_url": valkey_url, "queues": (queue,), **settings}
        app = create_app(GatewaySettings(**given))

        @app.post("/v1/orders", openapi_extra=request_body(Order))
        async def order(request: Request) -> dict[str, int]:
            return {"size": (await read_body(request, Order)).size}

        return app

    return make


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


async def chunks(size: int, number: int) -> AsyncIterator[bytes]:
    for _ in range(number):
        yield b" " * size


async def test_a_body_over_the_limit_is_a_413_also_without_a_length(
    make_app: Callable[..., FastAPI],
) -> None:
    app = make_app(max_body_bytes=10_000)
    async with client_of(app) as client:
        fits = await client.post("/v1/orders", content=b'{"size": 3}' + b" " * 9_000)
        assert fits.json() == {"size": 3}
        for content in (b" " * 10_001, chunks(1000, 100)):
            answer = await client.post("/v1/orders", content=content)
            assert answer.status_code == 413
            assert answer.json()["error"] == {
                "message": "The body is longer than 10000 bytes.",
                "type": "invalid_request_error",
                "param": None,
                "code": "request_too_large",
            }


async def test_another_content_type_is_refused(make_app: Callable[..., FastAPI]) -> None:
    async with client_of(make_app()) as client:
        for kind, status in (
            ("application/json; charset=utf-8", 200),
            ("text/plain", 415),
            ("multipart/form-data", 415),
        ):
            headers = {"Content-Type": kind}
            answer = await client.post("/v1/orders", content=b'{"size": 1}', headers=headers)
            assert answer.status_code == status


async def test_a_compressed_body_is_refused_by_its_header(make_app: Callable[..., FastAPI]) -> None:
    async with client_of(make_app()) as client:
        for encoding, status in (("identity", 200), ("gzip", 415), ("identity, br", 415)):
            headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
            answer = await client.post("/v1/orders", content=b'{"size": 1}', headers=headers)
            assert answer.status_code == status
        assert answer.json()["error"]["param"] == "Content-Encoding"
        assert answer.json()["error"]["message"].startswith("Content-Encoding: 'identity, br' is")
        assert answer.headers["Accept-Encoding"] == "identity"


async def test_all_bodies_together_stay_within_their_memory(
    make_app: Callable[..., FastAPI],
) -> None:
    app = make_app(max_body_bytes=10_000, max_bodies_bytes=15_000)
    is_held, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b" " * 8_000
        is_held.set()  # the gateway asks for more
        await go_on.wait()
        yield b'{"size": 1}'

    async with client_of(app) as client:
        first = asyncio.create_task(client.post("/v1/orders", content=slow()))
        await is_held.wait()
        second = await client.post("/v1/orders", content=b" " * 8_000)
        assert second.status_code == 503
        assert second.headers["Retry-After"] == "1"
        go_on.set()
        assert (await first).status_code == 200
        third = await client.post("/v1/orders", content=b" " * 9_000 + b'{"size": 1}')
        assert third.status_code == 200


async def test_a_body_that_does_not_come_is_a_408(
    make_app: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "READ_TIMEOUT_S", 0.1)

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    async with client_of(make_app()) as client:
        answer = await client.post("/v1/orders", content=never())
    assert answer.status_code == 408


def test_the_schema_shows_the_body_and_never_a_422(make_app: Callable[..., FastAPI]) -> None:
    schema = schema_of(make_app())
    operation = schema["paths"]["/v1/orders"]["post"]
    form = operation["requestBody"]["content"]["application/json"]["schema"]
    assert form == {"$ref": "#/components/schemas/Order"}
    assert {"Order", "Item", "Error"} <= set(schema["components"]["schemas"])
    for operations in schema["paths"].values():
        assert all("422" not in each["responses"] for each in operations.values())
