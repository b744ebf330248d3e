"""A local receiver of webhooks, ended jobs, and tasks processes in burst.

- `receiver`  an HTTP server that answers as told and keeps what it got
- `end_job`   submits a job with a webhook and ends it, as a worker does
- `settings`  settings of a tasks process for the test's queue and the receiver
- `burst_until`  a tasks process with its RQ worker, in the test's own process
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import redis

from inferq.producer import Client
from inferq.producer.partitions import Partitions
from inferq.producer.tasks.command import run_burst
from inferq.producer.tasks.deliveries import DeliveryStore
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.keys import TaskKeys
from inferq.protocol.webhooks import Webhook

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()


@dataclass
class Answer:
    """How the receiver answers one request."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    #: Seconds before the headers, and between the bytes of an endless body.
    wait_s: float = 0.0
    drip_s: float = 0.0


class Receiver:
    """Answers POSTs by `answers` in turn, the last one again and again; keeps them in `got`."""

    def __init__(self) -> None:
        self.answers = [Answer()]
        self.got: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.got.append((headers, body))
                answers = receiver.answers
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                time.sleep(answer.wait_s)
                with contextlib.suppress(OSError):  # whoever asked has gone
                    self.answer(answer)

            def answer(self, answer: Answer) -> None:
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                deadline = time.monotonic() + 10
                while answer.drip_s and time.monotonic() < deadline:
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(answer.drip_s)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.got]

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def make_answer() -> Callable[..., Answer]:
    return Answer


@pytest.fixture
def secret() -> str:
    return SECRET


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def make_settings(valkey_url: str, queue: str) -> Callable[..., TasksSettings]:
    def make(**given: Any) -> TasksSettings:
        return TasksSettings(
            **{
                "redis_url": valkey_url,
                "queues": (queue,),
                "workers": 1,
                "poll_interval_s": 0.05,
                "webhook_secrets": f"default={SECRET}",
                "webhook_allow_http": True,
                "webhook_allowed_networks": "127.0.0.0/8",
                "webhook_retry_delays_s": "0.01,0.01,0.01",
                "webhook_timeout_s": 5,
                "webhook_host_rate": 1000,
                "log_level": "debug",
                **given,
            }
        )

    return make


@pytest.fixture
def settings(make_settings: Callable[..., TasksSettings]) -> TasksSettings:
    return make_settings()


@pytest.fixture
def deliveries(valkey_url: str, queue: str) -> Callable[[Callable[..., Any]], Any]:
    """Calls a function with the store of the test's queue, and returns what it returns."""

    def call(operation: Callable[..., Any]) -> Any:
        async def main() -> Any:
            partitions = Partitions(valkey_url, queue, 1, timeout_s=4)
            try:
                server = partitions.server_of(TaskKeys.PREFIX)
                return await operation(DeliveryStore(server, queue))
            finally:
                await partitions.aclose()

        return asyncio.run(main())

    return call


@pytest.fixture
def plain_redis(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url) as client:
        yield client


@pytest.fixture
def end_job(sync_client: Client, worker_thread: Any, receiver: Receiver) -> Callable[..., str]:
    """Submit a job with a webhook, serve it three tokens, and return its id."""

    def end(url: str | None = None, **options: Any) -> str:
        handle = sync_client.submit("x", webhook=Webhook(url or receiver.url, **options))
        worker_thread.serve_next(3)
        return handle.id

    return end


@pytest.fixture
def burst_until(settings: TasksSettings) -> Callable[..., None]:
    """Does what is due, again and again, until a condition holds."""

    def run(
        condition: Callable[[], object], with_settings: TasksSettings = settings, most_s: float = 60
    ) -> None:
        give_up = time.monotonic() + most_s
        while True:
            run_burst(with_settings)
            if condition():
                return
            assert time.monotonic() < give_up
            time.sleep(0.02)

    return run
