"""What clients may expect of the gateway, case by case, by the official client."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from inferq.worker.engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def test_official_client(
    openai_client: openai.OpenAI, stand_in_worker: Any, start_gateway: Callable[..., Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    create = openai_client.chat.completions.create
    assert create(model="stand-in", messages=MESSAGES, max_tokens=3).choices[0].message.content
    stopped = create(model="stand-in", messages=MESSAGES, stop=[" fox"], seed=7)
    assert stopped.choices[0].message.content == "The quick brown"
    assert stopped.choices[0].finish_reason == "stop"
    assert stand_in_worker.last_request.seed == 7
    with pytest.raises(openai.BadRequestError):
        create(model="stand-in", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        create(model="nope", messages=MESSAGES)
    entry = {"name": "one", "sha256": hashlib.sha256(b"right").hexdigest()}
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{**entry, "requests_per_minute": 1, "lanes": ["normal"]}]))
    url = start_gateway(api_keys_file=keys).url
    for key, expected in (
        ("wrong", openai.AuthenticationError), ("right", None), ("right", openai.RateLimitError),
    ):  # fmt: skip
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            if expected is None:
                client.chat.completions.create(model="stand-in", messages=MESSAGES, max_tokens=1)
                continue
            with pytest.raises(expected) as caught:
                client.chat.completions.create(model="stand-in", messages=MESSAGES, max_tokens=1)
            assert caught.value.body
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="right", max_retries=0) as client,
        pytest.raises(openai.PermissionDeniedError, match="lane"),
    ):
        client.chat.completions.create(model="stand-in", messages=MESSAGES, service_tier="priority")


def test_unknown_model(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        answer = http.post(path, json={"model": "nope", **body})
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "stand-in" in error["message"]


def test_no_template(
    start_stand_in: Callable[..., Any], start_gateway: Callable[..., Any], smollm2: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    shutil.copy(smollm2 / "tokenizer.json", tmp_path)
    start_stand_in(tokenizer=Tokenizer.load(tmp_path), model="bare")
    gateway = start_gateway()
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="chat template") as caught:
                client.chat.completions.create(model="bare", messages=MESSAGES, stream=stream)
            assert caught.value.param == "messages"


def test_big_body(http: httpx.Client, gateway: Any, stand_in_worker: Any) -> None:
    limit = gateway.settings.max_body_bytes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    deep = b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"
    for body, status in (
        (b'{"prompt": "' + b"x" * limit + b'"}', 413),
        (json.dumps({"prompt": ["x"] * 10_000}).encode(), 400),
        (json.dumps({"prompt": "x", "n": 100_000}).encode(), 400),
        (json.dumps({"prompt": ["x"] * 1000, "n": 100}).encode(), 400),
        (json.dumps({"prompt": ["x"] * 65, "stream": True}).encode(), 400),
        (json.dumps({"prompt": "x", "stop": "y" * 2**20}).encode(), 400),
        (json.dumps({"prompt": "x" * (4 * 2**20 + 1)}).encode(), 400),
        (deep, 400),
        (b'{"prompt": "\xff"}', 400),
        (b"[]", 400),
        (b"", 400),
    ):
        answer = http.post(
            "/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == status, body[:40]
        assert answer.json()["error"]["message"]
        assert len(answer.content) < 2000
    assert not stand_in_worker.engine.requests
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 300 * 1024


def test_lanes_come_from_tier_and_priority(
    http: httpx.Client, gateway: Any, queue: str, stand_in_worker: Any
) -> None:
    lanes: list[tuple[dict[str, Any], str]] = [
        ({}, "normal"),
        ({"service_tier": "auto"}, "normal"),
        ({"service_tier": "default"}, "normal"),
        ({"service_tier": "priority"}, "high"),
        ({"service_tier": "flex"}, "low"),
        ({"priority": -5}, "high"),
        ({"priority": 0}, "normal"),
        ({"priority": 3, "service_tier": "flex"}, "low"),
        ({"priority": 3, "service_tier": "auto"}, "low"),
    ]
    client = gateway.app.state.gateway.clients[queue]
    for fields, lane in lanes:
        answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1, **fields})
        status = gateway.run(client.status(answer.headers["x-inferq-job-id"]))
        assert status.lane == lane, fields
    both = {"prompt": "Hi", "priority": -1, "service_tier": "flex"}
    answer = http.post("/v1/completions", json=both)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "priority"


def test_a_request_repeated_with_its_key_is_the_same_request(
    http: httpx.Client, stand_in_worker: Any
) -> None:
    asked = {"prompt": ["Hi", "Ho"], "max_tokens": 5}
    for headers in (
        {"Idempotency-Key": "once"},
        {"X-Request-Id": "twice", "X-Inferq-Idempotency": "request-id"},
    ):
        before = len(stand_in_worker.engine.requests)
        answers = [http.post("/v1/completions", json=asked, headers=headers) for _ in range(3)]
        assert len({answer.text for answer in answers}) == 1
        assert len(stand_in_worker.engine.requests) == before + 2
        other = http.post("/v1/completions", json={"prompt": "Else"}, headers=headers)
        assert other.status_code == 409
        assert other.json()["error"]["code"] == "idempotency_conflict"
        streamed = http.post("/v1/completions", json={**asked, "stream": True}, headers=headers)
        assert streamed.headers["x-inferq-job-id"] == answers[0].headers["x-inferq-job-id"]
    plain = [
        http.post("/v1/completions", json=asked, headers={"X-Request-Id": "same"}) for _ in range(2)
    ]
    assert plain[0].json()["id"] != plain[1].json()["id"]
    assert [answer.headers["x-request-id"] for answer in plain] == ["same", "same"]
    missing = http.post(
        "/v1/completions", json=asked, headers={"X-Inferq-Idempotency": "sometimes"}
    )
    assert missing.json()["error"]["param"] == "X-Inferq-Idempotency"


def test_prompts_of_one_request_are_submitted_all_or_none(
    start_gateway: Callable[..., Any], queue: str
) -> None:
    # without a worker, which might take some of them before the queue is full
    gateway = start_gateway(queue_limit=3, models={"m": queue}, accept_without_workers=True)
    client = gateway.app.state.gateway.clients[queue]
    asked = {"model": "m", "prompt": ["a"] * 5, "max_tokens": 100}
    with httpx.Client(base_url=gateway.url, timeout=60) as http:
        answer = http.post("/v1/completions", json=asked)
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["Retry-After"]) <= 600
        assert answer.json()["error"]["code"] == "queue_full"
        assert gateway.run(client.queue_length()).waiting == 0


def test_requests_beyond_the_gateways_own_limit_are_told_to_wait(
    start_gateway: Callable[..., Any], stand_in_worker: Any
) -> None:
    gateway = start_gateway(max_concurrent_requests=1)
    stand_in_worker.slow_down(0.02)
    asked = {"prompt": "a", "max_tokens": 4000, "cancel_on_disconnect": True, "stream": True}
    with httpx.Client(base_url=gateway.url, timeout=60) as http:
        with http.stream("POST", "/v1/completions", json=asked) as first:
            lines = first.iter_lines()  # kept: one that is dropped closes its connection
            next(lines)
            second = http.post("/v1/completions", json=asked)
            assert second.status_code == 503
            assert second.headers["Retry-After"]
        deadline = time.monotonic() + 30
        while len(gateway.app.state.gateway.in_flight):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_many_streams_at_once_all_end(gateway: Any, stand_in_worker: Any) -> None:
    ends: list[str] = []

    def ask() -> None:
        asked = {"messages": MESSAGES, "max_tokens": 20, "stream": True}
        with httpx.Client(base_url=gateway.url, timeout=60) as http:
            ends.append(http.post("/v1/chat/completions", json=asked).text[-14:])

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == ["data: [DONE]\n\n"] * 40
