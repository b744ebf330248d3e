"""A gateway process from start to end: what SIGTERM does to its requests."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from inferq import healthcheck
from inferq.embedded import EmbeddedServer

pytestmark = pytest.mark.model

#: The keep-alive is long: a comment in these streams is the goodbye.
PATIENT = {"keep_alive_s": 600.0}


def body(**more: Any) -> dict[str, Any]:
    return {"model": "stand-in", "prompt": "Hello", "max_tokens": 200, **more}


@pytest.fixture
def process(valkey_url: str, queue: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> subprocess.Popen[str]:
        arguments = ["gateway", "--port", "0", "--redis-url", valkey_url, "--queues", queue]
        arguments += ["--log-format", "json", *flags]
        begun = subprocess.Popen(
            [sys.executable, "-P", "-m", "inferq", *arguments],
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(begun)
        return begun

    yield start
    for each in started:
        if each.poll() is None:
            each.kill()
        each.communicate()


def text_of(lines: list[str]) -> str:
    """The text of a stream's chunks."""
    chunks = [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        row = json.loads(line)
        if row["event"] == "serving":
            return str(row["url"])
    raise AssertionError("the gateway ended before it served")


@pytest.mark.usefixtures("stand_in_worker")
def test_the_command_serves_until_sigterm_and_ends_with_0(
    process: Callable[..., subprocess.Popen[str]],
) -> None:
    started = process()
    url = url_of(started)
    assert httpx.get(f"{url}/readyz", timeout=30).status_code == 200
    assert healthcheck.listening_addresses(started.pid) == [("127.0.0.1", httpx.URL(url).port)]
    assert healthcheck.main([str(started.pid)]) == 0
    answer = httpx.post(f"{url}/v1/completions", json=body(max_tokens=3), timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 3
    started.send_signal(signal.SIGTERM)
    assert started.wait(60) == 0


def test_a_misspelt_variable_ends_the_command(
    process: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERQ_GATEWAY_HOSTS", "::")
    started = process()
    _, said = started.communicate(timeout=60)
    assert started.returncode == 2
    assert "INFERQ_GATEWAY_HOSTS: no such setting; did you mean INFERQ_GATEWAY_HOST?" in said


def test_streams_end_at_once_with_a_comment_and_their_jobs_go_on(
    stand_in_worker: Any, start_gateway: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    stand_in_worker.slow_down(0.05)
    gateway = start_gateway(**PATIENT)
    with (
        httpx.Client(base_url=gateway.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body(stream=True)) as stream,
    ):
        lines = stream.iter_lines()
        seen = [next(lines) for _ in range(20)]
        stopping = threading.Thread(target=gateway.stop)
        stopping.start()
        with pytest.raises(httpx.RemoteProtocolError):  # no client may take it for complete
            seen.extend(filter(None, lines))
        stopping.join()
    assert seen[-1].startswith(": this gateway is ending; where there is another")
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]
    stand_in_worker.slow_down(0.001)
    job = stream.headers["x-inferq-job-id"]
    last_id = [line for line in seen if line.startswith("id:")][-1].removeprefix("id:").strip()
    with start_gateway() as other, httpx.Client(base_url=other.url, timeout=60) as client:
        rest = client.get(f"/v1/streams/{job}", headers={"Last-Event-ID": last_id})
        whole = client.get(f"/v1/streams/{job}")
    assert rest.text.rstrip().endswith("data: [DONE]")
    assert 0 < len(text_of(seen)) < len(text_of(whole.text.splitlines()))
    assert text_of(seen) + text_of(rest.text.splitlines()) == text_of(whole.text.splitlines())


def test_requests_that_are_no_streams_may_finish(
    stand_in_worker: Any, start_gateway: Callable[..., Any]
) -> None:
    stand_in_worker.slow_down(0.02)
    gateway = start_gateway(shutdown_timeout_s=60.0)
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{gateway.url}/v1/completions", json=body(), timeout=90))

    asking = threading.Thread(target=ask)
    asking.start()
    in_flight = gateway.app.state.gateway.in_flight
    while not len(in_flight):
        time.sleep(0.01)
    gateway.stop()
    asking.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway.url}/livez")


def test_a_client_that_does_not_read_holds_the_end_up_no_longer_than_it_may(
    stand_in_worker: Any, start_gateway: Callable[..., Any]
) -> None:
    stand_in_worker.slow_down(0.0001)
    gateway = start_gateway(shutdown_timeout_s=1.0, **PATIENT)
    host, port = gateway.url.removeprefix("http://").split(":")
    payload = json.dumps(body(stream=True, max_tokens=4000, logprobs=5)).encode()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n"
        deaf.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + payload)
        deaf.recv(100)
        time.sleep(1)
        gateway.stop()  # raises if it takes a minute
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway.url}/livez")


def test_readiness_ends_before_connections_are_refused(
    stand_in_worker: Any, start_gateway: Callable[..., Any]
) -> None:
    gateway = start_gateway(shutdown_delay_s=3.0)
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        assert client.get("/readyz").status_code == 200
        stopping = threading.Thread(target=gateway.stop)
        stopping.start()
        while client.get("/readyz").status_code == 200:
            time.sleep(0.01)
        assert client.get("/readyz").json() == {"status": "shutting down"}
        served = client.post("/v1/completions", json=body(max_tokens=2))
        assert served.status_code == 200
        stopping.join()


def test_more_requests_than_it_may_serve_at_once_are_a_503(
    stand_in_worker: Any, start_gateway: Callable[..., Any]
) -> None:
    stand_in_worker.slow_down(0.05)
    gateway = start_gateway(max_concurrent_requests=1)
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body(stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            refused = client.post("/v1/completions", json=body())
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "overloaded"
            assert refused.headers["Retry-After"] == "1"
        stand_in_worker.slow_down(0.001)
        in_flight = gateway.app.state.gateway.in_flight
        while len(in_flight):
            time.sleep(0.01)
        assert client.post("/v1/completions", json=body(max_tokens=2)).status_code == 200


def test_a_server_that_is_away_is_a_503_until_it_is_back(
    start_stand_in: Callable[..., Any], start_gateway: Callable[..., Any]
) -> None:
    with EmbeddedServer(appendonly=True) as server:
        worker = start_stand_in(url=server.url)
        gateway = start_gateway(redis_url=server.url)
        with httpx.Client(base_url=gateway.url, timeout=60) as client:

            def ask() -> httpx.Response:
                return client.post("/v1/completions", json=body(max_tokens=2))

            assert ask().status_code == 200
            server.kill()
            answer = ask()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "server_lost"
            assert answer.headers["Retry-After"] == "5"
            assert "127.0.0.1" not in answer.text
            server.restart()
            deadline = time.monotonic() + 60
            while ask().status_code != 200:
                assert time.monotonic() < deadline
        gateway.stop()
        worker.stop()
