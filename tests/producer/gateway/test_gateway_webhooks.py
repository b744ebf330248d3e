"""`webhook` in a request: each of its jobs puts its end into the outbox."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from inferq.protocol.keys import QueueKeys
from inferq.protocol.webhooks import Webhook

URL = "https://example.com/hook"
COMPLETION = {"model": "stand-in", "prompt": ["a", "b"], "max_tokens": 3}
CHAT = {"model": "stand-in", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


async def outbox(client: redis.asyncio.Redis, queue: str) -> list[tuple[str, Webhook]]:
    rows = await client.xrange(QueueKeys(queue).outbox)
    return [(fields[b"id"].decode(), Webhook.decode(fields[b"hook"])) for _, fields in rows]


@pytest.mark.parametrize(
    ("path", "body", "jobs"), [("completions", COMPLETION, 2), ("chat/completions", CHAT, 1)]
)
async def test_every_job_of_a_request_is_told_of(
    path: str, body: dict[str, Any], jobs: int, stand_in_worker: Any, queue: str,
    start_gateway: Callable[..., Any], valkey_client: redis.asyncio.Redis, tmp_path: Path,
) -> None:  # fmt: skip
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"name": "alice", "sha256": hashlib.sha256(b"k").hexdigest()}]))
    gateway = start_gateway(accept_webhooks=True, api_keys_file=keys)
    body = {**body, "webhook": {"url": URL, "events": ["job.failed", "job.completed"]}}
    async with httpx.AsyncClient(
        base_url=gateway.url, timeout=60, headers={"Authorization": "Bearer k"}
    ) as http:
        answer = await http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    told = await outbox(valkey_client, queue)
    assert sorted(job_id for job_id, _ in told) == sorted(
        answer.headers["x-inferq-job-id"].split(",")
    )
    assert len(told) == jobs
    assert {webhook for _, webhook in told} == {
        Webhook(URL, ("job.completed", "job.failed"), secret="alice")
    }


async def test_without_keys_the_default_secret_signs(
    stand_in_worker: Any, queue: str, start_gateway: Callable[..., Any],
    valkey_client: redis.asyncio.Redis,
) -> None:  # fmt: skip
    gateway = start_gateway(accept_webhooks=True)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        answer = await http.post("/v1/chat/completions", json={**CHAT, "webhook": {"url": URL}})
    assert answer.status_code == 200, answer.text
    [(_, webhook)] = await outbox(valkey_client, queue)
    assert webhook == Webhook(URL)


@pytest.mark.parametrize(
    ("webhook", "param"),
    [
        ({"url": "ftp://example.com"}, "webhook.url"),
        ({"url": URL, "events": []}, "webhook.events"),
        ({"url": URL, "events": ["job.done"]}, "webhook.events"),
        ({"url": URL, "secret": "another's"}, "webhook.secret"),
        ({}, "webhook.url"),
        (URL, "webhook"),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)]
)
def test_what_is_no_webhook_is_refused_by_name(
    path: str, body: dict[str, Any], webhook: Any, param: str, stand_in_worker: Any,
    start_gateway: Callable[..., Any],
) -> None:  # fmt: skip
    gateway = start_gateway(accept_webhooks=True)
    answer = httpx.post(f"{gateway.url}/v1/{path}", json={**body, "webhook": webhook}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_gateway_that_takes_no_webhooks_says_so(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={**COMPLETION, "webhook": {"url": URL}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "webhook")
    message = answer.json()["error"]["message"]
    assert "not delivered here" in message
    assert message.startswith("webhook: is not ")
    assert "--accept-webhooks (INFERQ_GATEWAY_ACCEPT_WEBHOOKS)" in message
