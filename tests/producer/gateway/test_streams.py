"""Streams that are cut, resumed, cancelled, late or gone; two gateways before one server."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import redis

from inferq.protocol.keys import QueueKeys

pytestmark = pytest.mark.model

MESSAGES = [{"role": "user", "content": "Hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


@dataclass(frozen=True)
class Frame:
    """One server-sent event."""

    id: str | None
    data: Any


def frames(lines: Iterator[str]) -> Iterator[Frame]:
    event_id: str | None = None
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            yield Frame(event_id, value if value == "[DONE]" else json.loads(value))
            event_id = None


def read(http: httpx.Client, job: str, event_id: str | None = None) -> list[Frame]:
    headers = {} if event_id is None else {"Last-Event-ID": event_id}
    with http.stream("GET", f"/v1/streams/{job}", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(frames(answer.iter_lines()))


def begin(http: httpx.Client, path: str, asked: dict[str, Any], cut: int) -> list[Frame]:
    """Ask for a stream, read so many of its events, and hang up."""
    found: list[Frame] = []
    with http.stream("POST", path, json={**asked, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for frame in frames(answer.iter_lines()):
            found.append(frame)
            if len(found) == cut:
                return found
    return found


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 30}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 20, "n": 2, "logprobs": True}),
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 20, "echo": True}),
    ("/v1/completions", {"prompt": ["A", "B", "C"], "max_tokens": 10, "n": 2}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [WEATHER]}),
]


@pytest.fixture
def other(start_gateway: Callable[..., Any]) -> Iterator[httpx.Client]:
    """A client of another gateway, which begins its life after the streams did."""
    with httpx.Client(base_url=start_gateway().url, timeout=60) as client:
        yield client


def test_a_stream_cut_at_one_gateway_goes_on_at_another_without_loss_or_repeat(
    http: httpx.Client, stand_in_worker: Any, other: httpx.Client
) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo, NO"}}\n</tool_call>'
    for path, asked in ASKED:
        stand_in_worker.say(*([call] if "tools" in asked else []))
        asked = {**asked, "stream_options": {"include_usage": True}}
        for cut in (1, 2, 7, 13):
            first = begin(http, path, asked, cut)
            if first[-1].data == "[DONE]":  # a slow worker's calls have few events
                first.pop()
            response_id = first[0].data["id"]
            rest = read(other, response_id, first[-1].id)
            whole = read(http, response_id)
            assert rest[-1].data == "[DONE]"
            assert _told([*first, *rest]) == _told(whole)
            assert len(first) + len(rest) == len(whole)
            if "," not in (first[-1].id or ""):
                assert [*first, *rest] == whole


def _told(stream: list[Frame]) -> dict[int, tuple[str, str, list[str], list[Any]]]:
    """Return text, arguments of calls, ends and logprobs of every choice."""
    told: dict[int, tuple[list[str], list[str], list[str], list[Any]]] = {}
    for frame in stream[:-1]:
        for choice in frame.data["choices"]:
            texts, arguments, ends, logprobs = told.setdefault(choice["index"], ([], [], [], []))
            delta = choice.get("delta", {})
            texts.append(choice.get("text") or delta.get("content") or "")
            for call in delta.get("tool_calls", ()):
                arguments.append(call["function"]["arguments"])
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            logprobs += (choice["logprobs"] or {}).get("content", [])
    return {k: ("".join(t), "".join(a), ends, lps) for k, (t, a, ends, lps) in told.items()}


def test_an_id_that_is_none_of_the_streams_is_refused(
    http: httpx.Client, stand_in_worker: Any
) -> None:
    first = begin(http, "/v1/completions", {"prompt": "Hi", "max_tokens": 5}, 100)
    job = first[0].data["id"]
    assert first[-1].data == "[DONE]"
    tokens, _, chunk = (first[-2].id or "").partition("-")
    for bad in ("-1", "abc", "6", "999999999", "1,2", "", "0-0", f"{tokens}-{int(chunk) + 1}"):
        answer = http.get(f"/v1/streams/{job}", headers={"Last-Event-ID": bad})
        assert answer.status_code == 400, bad
        assert answer.json()["error"]["param"] == "Last-Event-ID"
        answer = http.get(f"/v1/streams/{job}", params={"last_event_id": bad})
        assert answer.status_code == 400, bad
    last = first[-2].id
    assert read(http, job, last) == [Frame(None, "[DONE]")]
    assert read(http, job, "0") == first
    stopped = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 50, "stop": "fox"})
    job = stopped.json()["id"]
    answer = http.get(f"/v1/streams/{job}", headers={"Last-Event-ID": "40"})
    assert answer.status_code == 400, "within the budget, but beyond the end"


def test_the_ids_of_jobs_are_ids_of_streams_too(http: httpx.Client, stand_in_worker: Any) -> None:
    answer = http.post("/v1/completions", json={"prompt": ["A", "B"], "max_tokens": 3})
    jobs = answer.headers["x-inferq-job-id"]
    assert len(jobs.split(",")) == 2
    assert _told(read(http, jobs)) == _told(read(http, answer.json()["id"]))
    second = jobs.split(",")[1]
    assert set(_told(read(http, second))) == {1}


def test_what_is_no_stream_or_somebody_elses_is_not_found(
    http: httpx.Client, stand_in_worker: Any, gateway: Any, queue: str, valkey_url: str
) -> None:
    nobody = f"{'0' * 32}-0"
    for method in ("GET", "DELETE"):
        assert http.request(method, f"/v1/streams/chatcmpl-{nobody}").status_code == 404
        assert http.request(method, "/v1/streams/nonsense").status_code == 400
    answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 3})
    job = answer.headers["x-inferq-job-id"]
    assert http.get(f"/v1/streams/cmpl-{job}").status_code == 200
    for other in (f"chatcmpl-{job}", f"cmpl-chatcmpl-{job}"):
        assert http.get(f"/v1/streams/{other}").status_code == 404, "of another kind"
    keys = QueueKeys(queue)
    with redis.Redis.from_url(valkey_url) as server:
        note = json.loads(server.hget(keys.job(job), "note") or b"")
        server.hset(keys.job(job), "note", json.dumps({**note, "key": "another"}))
        assert http.get(f"/v1/streams/{job}").status_code == 404
        assert http.delete(f"/v1/streams/{job}").status_code == 404
        server.hset(keys.job(job), "note", json.dumps(note))
        server.delete(keys.out(job))
        gone = http.get(f"/v1/streams/{job}")
    assert gone.status_code == 404
    assert "no longer" in gone.json()["error"]["message"]


def test_a_stream_is_cancelled_by_delete_and_says_so(
    http: httpx.Client, stand_in_worker: Any
) -> None:
    stand_in_worker.slow_down(0.02)
    asked = {"messages": MESSAGES, "max_tokens": 4000, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        found = frames(answer.iter_lines())
        job = next(found).data["id"]
        told = http.delete(f"/v1/streams/{job}").json()
        assert told["cancelled"] is True
        rest = list(found)
    assert rest[-1].data == "[DONE]"
    assert rest[-2].data["error"]["code"] == "cancelled"
    assert http.delete(f"/v1/streams/{job}").json()["cancelled"] is True
    done = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
    told = http.delete(f"/v1/streams/{done.json()['id']}").json()
    assert told["cancelled"] is False
    assert told["jobs"][0]["outcome"] == "finished"


def _wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_client_that_goes_away_leaves_its_job_unless_it_asked_otherwise(
    http: httpx.Client, gateway: Any, stand_in_worker: Any
) -> None:
    stand_in_worker.slow_down(0.02)
    engine = stand_in_worker.engine
    asked = {"messages": MESSAGES, "max_tokens": 100}
    kept = begin(http, "/v1/chat/completions", asked, 2)[0].data["id"]
    for path, body, headers in (
        ("/v1/chat/completions", {**asked, "max_tokens": 4000, "cancel_on_disconnect": True}, {}),
        ("/v1/completions", {"prompt": ["A", "B"], "max_tokens": 4000},
         {"X-Inferq-Cancel-On-Disconnect": "true"}),
    ):  # fmt: skip
        before = len(engine.aborted)
        with http.stream("POST", path, json={**body, "stream": True}, headers=headers) as answer:
            next(answer.iter_lines())
        jobs = answer.headers["x-inferq-job-id"].split(",")
        _wait_until(lambda: len(engine.aborted) >= before + len(jobs))  # noqa: B023
    before = len(engine.requests)
    with _send(gateway, {"prompt": "A", "max_tokens": 4000, "cancel_on_disconnect": True}):
        _wait_until(lambda: len(engine.requests) > before)
    _wait_until(lambda: len(engine.aborted) == 4)
    assert read(http, kept)[-2].data["choices"][0]["finish_reason"] == "length"
    _wait_until(lambda: len(gateway.app.state.gateway.in_flight) == 0)


def test_a_deadline_is_a_504_or_an_event_of_the_stream(
    http: httpx.Client, stand_in_worker: Any
) -> None:
    stand_in_worker.slow_down(0.05)
    asked = {"prompt": "Hi", "max_tokens": 4000}
    headers = {"X-Inferq-Deadline": "1.5"}  # some tokens come before it on a slow machine too

    def ask(stream: bool) -> httpx.Response:
        return http.post("/v1/completions", json={**asked, "stream": stream}, headers=headers)

    with ThreadPoolExecutor() as pool:
        answer, stream = pool.map(ask, (False, True))
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    found = list(frames(stream.iter_lines()))
    assert found[-2].data["error"]["code"] == "deadline_exceeded"
    assert found[-1].data == "[DONE]"
    for bad in ("0", "-1", "soon", "nan", "1e99"):
        answer = http.post("/v1/completions", json=asked, headers={"X-Inferq-Deadline": bad})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "X-Inferq-Deadline"
        assert answer.json()["error"]["message"].endswith("above 0 and up to 2592000")


def test_an_error_before_the_first_token_is_an_answer_of_its_own(
    openai_client: openai.OpenAI, http: httpx.Client, stand_in_worker: Any
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            openai_client.completions.create(
                model="stand-in", prompt="a " * 5000, max_tokens=1, stream=stream
            )
        assert "4096" in str(caught.value)
    # all or none: of the prompts of one request, one that is refused takes the others with it
    answer = http.post("/v1/completions", json={"prompt": ["Hi", "a " * 5000], "max_tokens": 900})
    assert answer.status_code == 400
    _wait_until(lambda: not stand_in_worker.engine._running)


def test_a_silent_stream_is_kept_alive(
    start_gateway: Callable[..., Any], stand_in_worker: Any
) -> None:
    stand_in_worker.slow_down(0.5)
    gateway = start_gateway(keep_alive_s=0.1)
    with httpx.Client(base_url=gateway.url, timeout=30) as http:
        asked = {"prompt": ["A", "B"], "max_tokens": 2, "stream": True}
        text = http.post("/v1/completions", json=asked).text
    assert text.count(": keep-alive\n\n") >= 3
    assert text.endswith("data: [DONE]\n\n")
    waiting = start_gateway(request_timeout_s=0.2)
    stand_in_worker.slow_down(2)
    with httpx.Client(base_url=waiting.url, timeout=30) as http:
        for stream in (False, True):
            late = http.post("/v1/completions", json={**asked, "stream": stream})
            assert late.status_code == 504
            assert late.json()["error"]["code"] == "timeout"
            assert late.headers["x-inferq-job-id"]


def test_a_stream_whose_events_bring_nothing_to_write_is_kept_alive(
    start_gateway: Callable[..., Any], stand_in_worker: Any
) -> None:
    """As long as what may be a call cannot be told from content, it is held back."""
    held = f'<tool_call>{{"arguments": {json.dumps({"city": "Brno " * 30})}, "name": "weather"}}'
    stand_in_worker.say(f"{held}</tool_call>")
    stand_in_worker.slow_down(0.02)
    gateway = start_gateway(keep_alive_s=0.2)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "stream": True}
    with httpx.Client(base_url=gateway.url, timeout=30) as http:
        text = http.post("/v1/chat/completions", json=asked).text
    role, _, rest = text.partition('"role":"assistant"')
    assert role
    assert '"tool_calls"' in rest
    assert rest.partition('"tool_calls"')[0].count(": keep-alive\n\n") >= 3


def test_a_client_that_does_not_read_is_waited_for(gateway: Any, stand_in_worker: Any) -> None:
    """Its events stay in the server; they are not heaped up in the gateway."""
    stand_in_worker.slow_down(0)
    asked = {"prompt": "Hi", "max_tokens": 1500, "n": 4, "logprobs": 20, "stream": True}
    with _send(gateway, asked) as client:
        answer = client.recv(1024)
        _wait_until(lambda: gateway.run(_buffered(gateway)) > 64)
        _wait_until(lambda: not stand_in_worker.engine._running)
        time.sleep(0.5)
        assert 64 < gateway.run(_buffered(gateway)) <= 128
        while piece := client.recv(2**16):
            answer += piece
    assert answer.count(b"data: {") == 4 * 1500 + 4
    assert b"data: [DONE]" in answer


def _send(gateway: Any, asked: dict[str, Any]) -> socket.socket:
    """Ask for a completion on a connection that takes little of its answer before it is read."""
    body, url = json.dumps(asked).encode(), httpx.URL(gateway.url)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "
    client = socket.socket()
    # set before it connects, so that the system holds little for it
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((url.host, url.port))
    client.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
    return client


async def _buffered(gateway: Any) -> int:
    """Return how many events wait in the gateway for a client."""
    [client] = gateway.app.state.gateway.clients.values()
    readers = [reader for readers in client._readers._readers.values() for reader in readers]
    subscriptions = [s for r in readers for group in r._followers.values() for s in group]
    return sum(len(subscription._entries) for subscription in subscriptions)


def test_a_gateway_that_ends_cuts_its_streams_so_that_they_go_on_elsewhere(
    gateway: Any, stand_in_worker: Any, http: httpx.Client, other: httpx.Client
) -> None:
    stand_in_worker.slow_down(0.02)
    asked = {"messages": MESSAGES, "max_tokens": 100, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        lines = frames(answer.iter_lines())
        found = [next(lines) for _ in range(5)]
        gateway.run(_close(gateway))
        with pytest.raises(httpx.RemoteProtocolError):
            found.extend(lines)
    rest = read(other, found[0].data["id"], found[-1].id)
    assert [*found, *rest] == read(other, found[0].data["id"])


async def _close(gateway: Any) -> None:
    gateway.app.state.gateway.in_flight.closing.set()
