"""Tasks on a Cluster and behind Sentinels: RQ's keys and the deliveries share one slot."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from inferq import Client, Webhook
from inferq.producer.tasks.command import run_burst
from inferq.producer.tasks.settings import TasksSettings

SECRET = "whsec_" + base64.b64encode(b"0" * 32).decode()


@pytest.fixture
def received() -> Iterator[tuple[str, list[str]]]:
    """The URL of a receiver, and the ids that it got."""
    ids: list[str] = []

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            ids.append(self.headers["webhook-id"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/", ids
        server.shutdown()
        thread.join()


def settings_of(url: str, queue: str, partitions: int) -> TasksSettings:
    return TasksSettings(
        redis_url=url,  # type: ignore[arg-type]
        queues=(queue,),
        partitions=partitions,
        webhook_secrets=f"default={SECRET}",  # type: ignore[arg-type]
        webhook_allow_http=True,
        webhook_host_rate=1000,
        webhook_allowed_networks=("127.0.0.0/8",),
    )


def test_webhooks_of_all_partitions_of_a_cluster_are_delivered(
    cluster: Any, queue: str, received: tuple[str, list[str]]
) -> None:
    url, ids = received
    with Client(cluster.url, queue, partitions=6) as client:
        jobs = [client.submit("x", webhook=Webhook(url)) for _ in range(12)]
        for job in jobs:
            job.cancel()
    run_burst(settings_of(cluster.url, queue, 6))
    assert sorted(ids) == sorted(f"msg_{job.id}" for job in jobs)


def test_webhooks_are_delivered_behind_sentinels_after_a_fail_over(
    sentinels: Any, queue: str, received: tuple[str, list[str]]
) -> None:
    url, ids = received
    with Client(sentinels.url, queue, reconnect_s=30) as client:
        first = client.submit("x", webhook=Webhook(url))
        first.cancel()
        run_burst(settings_of(sentinels.url, queue, 1))
        sentinels.fail_over()
        second = client.submit("x", webhook=Webhook(url))
        second.cancel()
        run_burst(settings_of(sentinels.url, queue, 1))
    assert ids == [f"msg_{first.id}", f"msg_{second.id}"]
