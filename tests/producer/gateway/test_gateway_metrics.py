"""What a gateway tells at /metrics of its requests, and of its queues."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from inferq import Client
from inferq.protocol.keys import Lane, QueueKeys
from inferq.runtime import figures

pytestmark = pytest.mark.model

TIMEOUT_S = 60
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def scrape(metrics_text: Any) -> Callable[..., Any]:
    """Reads the metrics of a gateway, and checks them against the page that documents them."""

    def read(url: str) -> Any:
        answer = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S)
        assert answer.status_code == 200
        found = metrics_text.Scrape(answer.text)
        metrics_text.check_against_page(found)
        return found

    return read


@pytest.fixture
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each scrape read the queues anew."""
    monkeypatch.setattr(figures, "STANDS_S", 0)


def wait_until(look: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + TIMEOUT_S
    while not (found := look()):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    return found


def requests(found: Any, **labels: str) -> float:
    return sum(found.values("inferq_gateway_requests_total", **labels).values())


def test_requests_are_told_by_route_method_and_status(
    gateway: Any, http: httpx.Client, scrape: Callable[..., Any]
) -> None:
    body = {"model": "stand-in", "prompt": "Hi", "max_tokens": 3}
    sent = [http.post(COMPLETIONS, json=body) for _ in range(3)]
    sent.append(http.post(COMPLETIONS, json={**body, "max_tokens": -1}))
    sent.append(http.post(CHAT, content=b"{"))
    sent.append(http.get("/v1/models"))
    sent.append(http.get("/v1/streams/nonsense"))
    sent.append(http.post("/v1/audio/speech"))
    sent.append(http.get("/v1/nothing"))
    sent.append(http.request("PROPFIND", "/somewhere"))
    sent.append(http.put("/v1/models"))
    sent.append(http.patch("/v1/vector_stores/a"))
    found = scrape(gateway.url)
    expected = {
        (COMPLETIONS, "POST", "200"): 3,
        (COMPLETIONS, "POST", "400"): 1,
        (CHAT, "POST", "400"): 1,
        ("/v1/models", "GET", "200"): 1,
        ("/v1/streams/{stream_id}", "GET", str(sent[6].status_code)): 1,
        ("unsupported", "POST", "404"): 1,
        ("unknown", "GET", "404"): 1,
        ("unknown", "other", "404"): 1,
        ("/v1/models", "PUT", "405"): 1,
        ("unsupported", "PATCH", "404"): 1,
    }
    told = {
        (found_labels["route"], found_labels["method"], found_labels["status"]): count
        for labels, count in found.values("inferq_gateway_requests_total").items()
        if (found_labels := dict(labels))
    }
    assert told == expected
    bodies = sum(len(answer.request.content) for answer in sent)
    assert found.value("inferq_gateway_request_body_bytes_total") == bodies
    answers = sum(len(answer.content) for answer in sent)
    assert found.value("inferq_gateway_response_body_bytes_total") == answers
    first = "inferq_gateway_time_to_first_byte_seconds_count"
    assert found.value(first, route=COMPLETIONS) == 3
    assert found.value(first, route="/v1/models") == 1
    assert len(found.values(first)) == 2
    assert requests(scrape(gateway.url), route="/metrics", status="200") == 1


def test_streams_are_told_while_they_are_open(
    stand_in_worker: Any, start_gateway: Callable[..., Any], scrape: Callable[..., Any]
) -> None:
    gateway = start_gateway(max_concurrent_requests=1)
    stand_in_worker.slow_down(0.02)
    body = {"model": "stand-in", "prompt": "Hi", "max_tokens": 4000}
    with httpx.Client(base_url=gateway.url, timeout=TIMEOUT_S) as http:
        with http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            assert http.post(COMPLETIONS, json=body).status_code == 503
            found = scrape(gateway.url)
            name = answer.headers["X-Inferq-Job-Id"]
        http.delete(f"/v1/streams/{name}")
        assert found.value("inferq_gateway_streams_open") == 1
        assert found.value("inferq_gateway_generations_in_flight") == 1
        assert found.value("inferq_gateway_requests_in_flight") == 2  # and the scrape itself
        assert found.value("inferq_gateway_time_to_first_byte_seconds_count") == 1
        assert found.value("inferq_gateway_rate_limited_total", reason="overloaded") == 1
        assert requests(found, route=COMPLETIONS, status="200") == 0
    wait_until(lambda: not scrape(gateway.url).value("inferq_gateway_streams_open"))
    found = scrape(gateway.url)
    assert found.value("inferq_gateway_requests_in_flight") == 1
    assert found.value("inferq_gateway_generations_in_flight") == 0
    assert requests(found, route=COMPLETIONS, status="200") == 1
    assert requests(found, route="/v1/streams/{stream_id}", method="DELETE") == 1


@pytest.fixture
def keys_file(tmp_path: Path, queue: str) -> Path:
    file = tmp_path / "keys.json"
    digest = hashlib.sha256(b"secret").hexdigest()
    file.write_text(json.dumps([{"name": queue, "sha256": digest, "requests_per_minute": 2}]))
    return file


def test_who_is_turned_away_is_told_by_why_and_nobody_by_name(
    stand_in_worker: Any,
    start_gateway: Callable[..., Any],
    keys_file: Path,
    queue: str,
    scrape: Callable[..., Any],
) -> None:
    gateway = start_gateway(api_keys_file=keys_file)
    asked = {"model": "stand-in", "prompt": "Hi", "max_tokens": 1}
    with httpx.Client(base_url=gateway.url, timeout=TIMEOUT_S) as client:
        statuses = [client.post(COMPLETIONS, json=asked).status_code]
        client.headers["Authorization"] = "Bearer secret"
        statuses += [client.post(COMPLETIONS, json=asked).status_code for _ in range(3)]
    assert statuses == [401, 200, 200, 429]
    found = scrape(gateway.url)
    assert found.value("inferq_gateway_rate_limited_total", reason="requests") == 1
    assert sum(found.values("inferq_gateway_rate_limited_total").values()) == 1
    assert requests(found, route=COMPLETIONS, status="401") == 1
    assert not [labels for _, labels in found.series if "stand-in" in dict(labels).values()]
    keys = [name for name, labels in found.series if queue in dict(labels).values()]
    assert all(name.startswith("inferq_queue_") for name in keys)  # the key has the queue's name


def test_a_full_queue_turns_away(
    valkey_url: str,
    start_gateway: Callable[..., Any],
    queue: str,
    scrape: Callable[..., Any],
) -> None:
    gateway = start_gateway(
        queue_limit=1,
        models={"ghost": queue},
        accept_without_workers=True,
    )
    asked = {"model": "ghost", "prompt": "Hi", "max_tokens": 1}
    with (
        httpx.Client(base_url=gateway.url, timeout=TIMEOUT_S) as client,
        Client(valkey_url, queue) as producer,
    ):
        producer.submit("x")  # which nobody takes
        assert client.post(COMPLETIONS, json=asked).json()["error"]["code"] == "queue_full"
    found = scrape(gateway.url)
    assert found.value("inferq_gateway_rate_limited_total", reason="queue_full") == 1


@pytest.mark.usefixtures("always_fresh")
def test_queues_are_told_apart_with_their_workers(
    valkey_url: str,
    start_stand_in: Callable[..., Any],
    start_gateway: Callable[..., Any],
    queue: str,
    scrape: Callable[..., Any],
) -> None:
    other = f"{queue}-other"
    start_stand_in(name="first")
    start_stand_in(name="second")
    gateway = start_gateway(queues=(queue, other))
    with Client(valkey_url, queue) as served, Client(valkey_url, other) as waiting:
        for _ in range(3):
            served.submit("Hi", lane="high").cancel()
        jobs = [waiting.submit("Hi", lane=lane) for lane in ("high", "low", "low")]
        found = wait_until(lambda: _up(scrape(gateway.url)))
        assert found.value("inferq_queue_workers", queue=queue) == 2
        assert found.value("inferq_queue_workers", queue=other) == 0
        depths = {
            lane.value: found.value("inferq_queue_depth", queue=other, lane=lane.value)
            for lane in Lane
        }
        assert depths == {"high": 1, "normal": 0, "low": 2}
        assert found.value("inferq_queue_jobs", queue=other, state="queued") == 3
        assert found.value("inferq_queue_oldest_age_seconds", queue=other, lane="normal") == 0
        with redis.Redis.from_url(valkey_url) as plain:
            load = plain.hgetall(QueueKeys(other).load)
        told = found.value("inferq_queue_outstanding_tokens", queue=other, kind="prompt")
        assert told == int(load[b"prompt_tokens"])
        for job in jobs:
            job.cancel()
        wait_until(
            lambda: scrape(gateway.url).value("inferq_queue_jobs_ended_total", queue=other) == 3
        )


def _up(found: Any) -> Any:
    """The scrape, if every queue could be read: a busy machine may need several tries."""
    return found if all(found.values("inferq_queue_up").values()) else None


@pytest.mark.usefixtures("always_fresh")
def test_figures_of_a_server_that_is_away_are_left_out(
    own_server: Any, start_gateway: Callable[..., Any], queue: str, scrape: Callable[..., Any]
) -> None:
    gateway = start_gateway(redis_url=own_server.url)
    wait_until(lambda: _up(scrape(gateway.url)))
    own_server.kill()
    away = wait_until(lambda: found if not _up(found := scrape(gateway.url)) else None)
    assert {name for name, labels in away.series if ("queue", queue) in labels} == {
        "inferq_queue_up"
    }
    own_server.restart()
    back = wait_until(lambda: _up(scrape(gateway.url)))
    assert back.value("inferq_queue_depth", lane="high") == 0


def test_metrics_can_have_a_port_of_their_own(
    start_gateway: Callable[..., Any], scrape: Callable[..., Any], keys_file: Path
) -> None:
    gateway = start_gateway(metrics_port=0, api_keys_file=keys_file)
    assert httpx.get(f"{gateway.url}/metrics", timeout=TIMEOUT_S).status_code == 404
    port = gateway.server.metrics_port
    found = scrape(f"http://127.0.0.1:{port}")
    assert requests(found, route="unknown", status="404") == 1
    assert httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=TIMEOUT_S).status_code == 404


def test_metrics_need_no_key_and_come_in_both_forms(
    start_gateway: Callable[..., Any], keys_file: Path, metrics_text: Any
) -> None:
    gateway = start_gateway(api_keys_file=keys_file)
    accept = "application/openmetrics-text;version=1.0.0,*/*;q=0.1"
    answer = httpx.get(f"{gateway.url}/metrics", headers={"Accept": accept}, timeout=TIMEOUT_S)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    found = metrics_text.Scrape(answer.text, openmetrics=True)
    assert found.value("inferq_gateway_requests_in_flight") == 1


def test_whatever_is_asked_the_series_stay_few(
    gateway: Any, http: httpx.Client, scrape: Callable[..., Any]
) -> None:
    def ask(k: int) -> None:
        http.request(f"M{k}", f"/x/{k}")
        http.get(f"/v1/streams/{k:032x}-0", params={"q": k})
        http.get(f"/static/{k}.js")
        http.get(f"/v1/audio/{k}", headers={"X-Request-Id": f"id-{k}", "Authorization": f"B {k}"})
        http.post(COMPLETIONS, json={"model": f"model-{k}", "prompt": f"prompt {k}"})
        http.post(CHAT, json={f"field-{k}": k})

    ask(0)
    scrape(gateway.url)
    before = scrape(gateway.url).series
    for k in range(1, 12):
        ask(k)
    assert scrape(gateway.url).series == before
