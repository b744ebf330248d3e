"""Errors: every one in OpenAI's shape, with the class that clients make of its status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI, Request

from inferq.producer.gateway.app import create_app
from inferq.producer.gateway.errors import HttpError, to_http_error
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol import errors
from inferq.protocol.errors import ErrorCode, ErrorInfo

JOB = "0123456789ab" + "0" * 20 + "-0"


def failed(code: str, message: str = "prompt: too long", field: str | None = None) -> Exception:
    return errors.JobFailed(JOB, ErrorInfo(code, message, field))


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (errors.InvalidRequestError("is bad", field="n"), 400, "invalid_request_error", None, "n"),
        (
            errors.InvalidRequestError("no", field="model", code=ErrorCode.MODEL_NOT_FOUND),
            *(404, "invalid_request_error", "model_not_found", "model"),
        ),
        (
            errors.InvalidRequestError("no", field="deadline_s"),
            *(400, "invalid_request_error", None, "X-Inferq-Deadline"),
        ),
        (errors.QueueFull("full"), 429, "rate_limit_error", "queue_full", None),
        (
            errors.IdempotencyConflict("k", JOB),
            *(409, "invalid_request_error", "idempotency_conflict", "Idempotency-Key"),
        ),
        (errors.JobNotFound(JOB), 404, "invalid_request_error", "job_not_found", "id"),
        (errors.StreamExpired(JOB), 404, "invalid_request_error", "job_not_found", "id"),
        (errors.JobExpired(JOB), 504, "server_error", "deadline_exceeded", None),
        (errors.ResultTimeout(JOB, 5), 504, "server_error", "timeout", None),
        (errors.JobCancelled(JOB), 409, "invalid_request_error", "cancelled", None),
        (
            failed(ErrorCode.INVALID_REQUEST, field="prompt"),
            *(400, "invalid_request_error", None, "prompt"),
        ),
        (
            failed(ErrorCode.MODEL_NOT_FOUND, field="model"),
            *(404, "invalid_request_error", "model_not_found", "model"),
        ),
        (
            failed(ErrorCode.CONTEXT_LENGTH, field="messages"),
            *(400, "invalid_request_error", "context_length_exceeded", "messages"),
        ),
        (failed(ErrorCode.WORKER_CRASHED), 500, "server_error", "worker_crashed", None),
        (failed(ErrorCode.INTERNAL), 500, "server_error", "internal_error", None),
        (errors.ServerLost("redis at secret-host"), 503, "server_error", "server_lost", None),
        (errors.StreamGap(JOB, 3, 5), 500, "server_error", "internal_error", None),
        (KeyError("secret"), 500, "server_error", "internal_error", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_every_error_has_its_status_and_shape(
    error: Exception, status: int, kind: str, code: str | None, param: str | None
) -> None:
    answer = to_http_error(error)
    assert (answer.status, answer.type, answer.code, answer.param) == (status, kind, code, param)
    assert answer.body == {
        "error": {"message": answer.message, "type": kind, "param": param, "code": code}
    }
    assert "secret" not in answer.message
    assert ("Retry-After" in answer.headers) == (status in {429, 503})
    assert answer.headers["x-should-retry"] == ("true" if status in {429, 503} else "false")


def test_an_error_names_its_field_once_and_as_openai_does() -> None:
    answer = to_http_error(failed(ErrorCode.INVALID_REQUEST, "lane: 'x' is none", "lane"))
    assert answer.message == "service_tier: 'x' is none"
    answer = to_http_error(errors.InvalidRequestError("is bad", field="n"))
    assert answer.message == "n: is bad"


def test_errors_speak_of_what_the_gateway_has() -> None:
    answer = to_http_error(
        failed(ErrorCode.INVALID_REQUEST, "beam_width: 9 are many", "beam_width")
    )
    assert (answer.message, answer.param) == ("use_beam_search: 9 are many", "use_beam_search")
    answer = to_http_error(errors.IdempotencyConflict("my-key", JOB))
    assert answer.message.startswith("Idempotency-Key 'my-key' already belongs to job")


def test_a_retry_is_in_whole_seconds_within_bounds() -> None:
    full = errors.QueueFull("full")
    waits = [to_http_error(full, retry_after_s=s).headers for s in (0.01, 1.2, 10_000.0)]
    assert [each["Retry-After"] for each in waits] == ["1", "2", "600"]


@pytest.fixture
def tried() -> list[str]:
    """The requests that were made to fail."""
    return []


@pytest.fixture
def make_client(valkey_url: str, queue: str, tried: list[str]) -> Callable[..., httpx.AsyncClient]:
    def make(**settings: Any) -> httpx.AsyncClient:
        app = create_app(GatewaySettings(redis_url=valkey_url, queues=(queue,), **settings))  # type: ignore[arg-type]
        add_faults(app, tried)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")

    return make


def add_faults(app: FastAPI, tried: list[str]) -> None:
    @app.get("/fault")
    async def fault(request: Request) -> None:
        raise KeyError("the secret")

    @app.get("/number")
    async def number(value: int) -> int:
        return value

    @app.post("/{status}/chat/completions")
    async def fail(status: str) -> None:
        tried.append(status)
        raise {
            "expired": errors.JobExpired(JOB),
            "late": errors.ResultTimeout(JOB, 5),
            "cancelled": errors.JobCancelled(JOB),
            "conflict": errors.IdempotencyConflict("k", JOB),
            "crashed": failed(ErrorCode.WORKER_CRASHED),
            "away": HttpError(503, "no", headers={"Retry-After": "0"}),
            "full": HttpError(429, "no", headers={"Retry-After": "0"}),
        }[status]

    @app.get("/full")
    async def full() -> None:
        raise errors.QueueFull("full", depth=10, limit=10)


async def test_unknown_paths_and_methods_are_errors_of_openais_shape(
    make_client: Callable[..., httpx.AsyncClient],
) -> None:
    async with make_client() as client:
        answer = await client.get("/v1/nothing")
        assert answer.status_code == 404
        assert answer.json()["error"] == {
            "message": "Unknown request URL: GET /v1/nothing.",
            "type": "invalid_request_error",
            "param": None,
            "code": "unknown_url",
        }
        assert (await client.get("/v1/models/")).status_code == 404
        answer = await client.put("/v1/models")
        assert answer.status_code == 405
        assert answer.headers["allow"] == "GET"
        assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/v1/embeddings", "Embeddings"),
        ("POST", "/v1/images/generations", "Images"),
        ("POST", "/v1/audio/speech", "Audio"),
        ("GET", "/v1/fine_tuning/jobs", "Fine-tuning"),
        ("POST", "/v1/responses", "use /v1/chat/completions"),
        ("DELETE", "/v1/assistants/a", "Assistants"),
        ("PATCH", "/v1/vector_stores/a", "Vector stores"),
    ],
)
async def test_what_is_not_supported_says_so(
    make_client: Callable[..., httpx.AsyncClient], method: str, path: str, words: str
) -> None:
    async with make_client() as client:
        answer = await client.request(method, path, content=b"x")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "unsupported_endpoint"
        assert words in answer.json()["error"]["message"]


async def test_a_fault_of_ours_shows_nothing_of_itself(
    make_client: Callable[..., httpx.AsyncClient],
) -> None:
    async with make_client() as client:
        answer = await client.get("/fault")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "secret" not in answer.text
        assert answer.headers["x-request-id"].startswith("req_")


async def test_a_bad_parameter_is_never_a_422(
    make_client: Callable[..., httpx.AsyncClient],
) -> None:
    async with make_client() as client:
        answer = await client.get("/number?value=x")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "value"


async def test_a_full_queue_is_a_429_that_says_when_to_come_back(
    make_client: Callable[..., httpx.AsyncClient],
) -> None:
    async with make_client() as client:
        answer = await client.get("/full")
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) == 5


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        *(("expired", 1), ("late", 1), ("cancelled", 1), ("conflict", 1), ("crashed", 1)),
        *(("away", 3), ("full", 3)),
    ],
)
async def test_openais_client_sends_again_only_what_may_be_served_then(
    make_client: Callable[..., httpx.AsyncClient], tried: list[str], kind: str, times: int
) -> None:
    client = openai.AsyncOpenAI(
        base_url=f"http://gateway/{kind}", api_key="none", http_client=make_client()
    )
    async with client:
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="m", messages=[])
    assert tried == [kind] * times


async def test_a_request_keeps_its_name(make_client: Callable[..., httpx.AsyncClient]) -> None:
    async with make_client() as client:
        given = {"X-Request-Id": "my-request.1"}
        assert (await client.get("/livez", headers=given)).headers["x-request-id"] == "my-request.1"
        names = {(await client.get("/livez")).headers["x-request-id"] for _ in range(2)}
        assert len(names) == 2
        bad = {"X-Request-Id": "x" * 201}
        assert (await client.get("/livez", headers=bad)).headers["x-request-id"].startswith("req_")


async def test_the_page_of_the_api_needs_nothing_from_elsewhere(
    make_client: Callable[..., httpx.AsyncClient],
) -> None:
    async with make_client() as client:
        schema = (await client.get("/openapi.json")).json()
        assert schema["openapi"].startswith("3.")
        page = await client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        for path, operations in schema["paths"].items():
            assert path in page.text
            assert all("content" in each["responses"]["200"] for each in operations.values())
        assert "<script" not in page.text
        assert "http://" not in page.text
        assert "https://" not in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]


def test_an_http_error_is_its_own_answer() -> None:
    error = HttpError(418, "tea")
    assert to_http_error(error) is error
