"""What a key may do, through HTTP and with the official client's error classes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis.asyncio

pytestmark = pytest.mark.model


@pytest.fixture
def ask(
    stand_in_worker: Any, start_gateway: Callable[..., Any], tmp_path: Path, queue: str
) -> Iterator[Callable[..., Any]]:
    """Complete a prompt at a gateway that knows one key, with limits."""
    clients: list[openai.OpenAI] = []

    def client_of(**limits: Any) -> openai.OpenAI:
        # the queue's name is no other test's; neither may the key's be
        entry = {"name": queue, "sha256": hashlib.sha256(b"secret").hexdigest(), **limits}
        file = tmp_path / "keys.json"
        file.write_text(json.dumps([entry]))
        gateway = start_gateway(api_keys_file=file)
        made = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="secret", max_retries=0)
        clients.append(made)
        return made

    yield client_of
    for client in clients:
        client.close()


def complete(client: openai.OpenAI, **more: Any) -> Any:
    given = {"model": "stand-in", "prompt": "Hi", "max_tokens": 5, **more}
    return client.completions.with_raw_response.create(**given)


def test_requests_beyond_the_limit_are_rate_limit_errors(ask: Callable[..., openai.OpenAI]) -> None:
    client = ask(requests_per_minute=2, tokens_per_minute=1000)
    first = complete(client)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    complete(client)
    with pytest.raises(openai.RateLimitError) as raised:
        complete(client)
    assert raised.value.code == "rate_limit_exceeded"
    assert 1 <= int(raised.value.response.headers["Retry-After"]) <= 30


def test_what_a_request_did_not_use_comes_back(ask: Callable[..., openai.OpenAI]) -> None:
    client = ask(tokens_per_minute=1000)
    # each is bounded by its context of 4096 tokens, and uses few
    for stop in ("fox", "dog", "fox"):
        complete(client, max_tokens=None, stop=[stop], prompt="Hello there")
    for _ in range(2):
        raw = complete(client, max_tokens=900, stop=["fox"], stream=True)
        for _ in raw.parse():
            pass
    complete(client, max_tokens=900)  # all of which it uses
    with pytest.raises(openai.RateLimitError):
        complete(client, max_tokens=900)


def test_a_request_that_is_refused_costs_no_tokens(ask: Callable[..., openai.OpenAI]) -> None:
    client = ask(tokens_per_minute=5000)
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match="leave no room for output") as refused:
            complete(client, prompt=[5] * 4096, **more)
        assert refused.value.code == "context_length_exceeded"
    assert int(complete(client).headers["x-ratelimit-remaining-tokens"]) > 4900


def test_models_and_lanes_of_others_are_permission_errors(
    ask: Callable[..., openai.OpenAI],
) -> None:
    client = ask(models=["another"], lanes=["low"])
    assert client.models.list().data == []
    with pytest.raises(openai.PermissionDeniedError, match="may not use the model"):
        complete(client)
    client = ask(models=["stand-in"], lanes=["low"])
    assert [model.id for model in client.models.list()] == ["stand-in"]
    for given in ({}, {"service_tier": "priority"}, {"priority": -1}):
        with pytest.raises(openai.PermissionDeniedError, match="lane; it may use: low"):
            complete(client, extra_body=given)
    assert complete(client, extra_body={"service_tier": "flex"}).status_code == 200


def test_a_wrong_key_is_an_authentication_error(ask: Callable[..., openai.OpenAI]) -> None:
    client = ask().with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        complete(client)


def test_a_stream_takes_its_slot_until_it_ends_or_its_client_leaves(
    ask: Callable[..., openai.OpenAI], stand_in_worker: Any
) -> None:
    stand_in_worker.slow_down(0.02)
    client = ask(max_concurrency=1)
    stream = client.completions.create(
        model="stand-in", prompt="Hi", max_tokens=4000, stream=True,
        extra_headers={"X-Inferq-Cancel-On-Disconnect": "true"},
    )  # fmt: skip
    next(stream)
    with pytest.raises(openai.RateLimitError, match="1 jobs at once"):
        complete(client)
    with pytest.raises(openai.BadRequestError, match="makes 2 jobs"):
        complete(client, prompt=["a", "b"])
    stream.close()
    deadline = time.monotonic() + 60
    while True:
        try:
            complete(client)
            break
        except openai.RateLimitError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    complete(client)


def test_one_stream_after_another_never_meets_its_own_slot(
    ask: Callable[..., openai.OpenAI],
) -> None:
    client = ask(max_concurrency=1)
    chunks = [list(complete(client, stream=True).parse()) for _ in range(10)]
    assert all(stream[-1].choices[0].finish_reason for stream in chunks)


def test_jobs_wait_for_a_worker_where_the_settings_say_so(
    start_stand_in: Callable[..., Any], start_gateway: Callable[..., Any], queue: str
) -> None:
    gateway = start_gateway(models={"stand-in": queue}, accept_without_workers=True)
    answers: list[httpx.Response] = []
    asked = {"model": "stand-in", "prompt": "Hi", "max_tokens": 3}

    def ask() -> None:
        answers.append(httpx.post(f"{gateway.url}/v1/completions", json=asked, timeout=90))

    asking = threading.Thread(target=ask)
    asking.start()
    in_flight = gateway.app.state.gateway.in_flight
    while not len(in_flight):
        time.sleep(0.01)
    start_stand_in()
    asking.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 3


def test_without_a_worker_it_is_an_error_that_clients_retry(
    start_gateway: Callable[..., Any],
) -> None:
    gateway = start_gateway()
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.InternalServerError) as raised:
        complete(client)
    assert raised.value.status_code == 503
    assert raised.value.response.headers["Retry-After"] == "5"
    client.close()


def test_a_full_queue_is_a_rate_limit_error(start_gateway: Callable[..., Any], queue: str) -> None:
    gateway = start_gateway(models={"m": queue}, accept_without_workers=True, queue_limit=1)
    body = {"model": "m", "prompt": "x", "stream": True}
    with httpx.Client(base_url=gateway.url, timeout=60) as http:
        gateway.run(gateway.app.state.gateway.clients[queue].submit("x"))
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "queue_full"
    assert 1 <= int(answer.headers["Retry-After"]) <= 600


async def test_many_limited_streams_share_eight_connections(
    stand_in_worker: Any,
    start_gateway: Callable[..., Any],
    valkey_client: redis.asyncio.Redis,
    queue: str,
    tmp_path: Path,
) -> None:
    entry = {"name": queue, "sha256": hashlib.sha256(b"k").hexdigest(), "max_concurrency": 1000}
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([entry]))
    before = {each["id"] for each in await valkey_client.client_list()}
    gateway = start_gateway(api_keys_file=file)
    body = {"model": "stand-in", "prompt": "Hi", "max_tokens": 50, "stream": True}

    async def stream(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json=body)
        assert answer.text.rstrip().endswith("data: [DONE]")

    headers = {"Authorization": "Bearer k"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=gateway.url, timeout=90, headers=headers, limits=limits
    ) as client:
        streams = [asyncio.create_task(stream(client)) for _ in range(60)]
        most = 0
        while not all(each.done() for each in streams):
            now = {each["id"] for each in await valkey_client.client_list()}
            most = max(most, len(now - before))
            await asyncio.sleep(0.05)
        await asyncio.gather(*streams)
    assert 2 <= most <= 8
