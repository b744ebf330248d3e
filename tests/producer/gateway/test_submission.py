"""What becomes of the jobs of a request that ends while they are submitted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inferq.producer.async_client import AsyncJobHandle
from inferq.producer.gateway.requests.completion import ask_completion
from inferq.producer.gateway.requests.delivery import Delivery
from inferq.producer.gateway.requests.schemas import CompletionBody
from inferq.producer.gateway.requests.submission import submit
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.errors import QueueFull
from inferq.protocol.keys import Lane


class Client:
    """A queue that takes the prompts "a", had "old" before, refuses "full", and else hangs."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.hangs = asyncio.Event()

    async def submit(self, prompt: str, **_: Any) -> AsyncJobHandle:
        if prompt in ("a", "old"):
            return AsyncJobHandle(self, f"job-{prompt}", created=prompt == "a")  # type: ignore[arg-type]
        if prompt == "full":
            raise QueueFull("no room")
        self.hangs.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)


def submission(client: Client, *prompts: str, cancels_partial: bool = True) -> Any:
    body = CompletionBody.model_validate({"prompt": ["first", *prompts], "max_tokens": 1})
    asked = ask_completion(body, "m", GatewaySettings(max_prompts=10))
    delivery = Delivery(Lane.NORMAL, None, None, "", cancel_on_disconnect=False)
    return submit(client, "q", asked, delivery, cancels_partial=cancels_partial)  # type: ignore[arg-type]


async def test_a_request_that_is_cancelled_meanwhile_takes_its_jobs_with_it() -> None:
    client = Client()
    request = asyncio.create_task(submission(client, "a", "old", "hangs"))
    await client.hangs.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert client.cancelled == ["job-a"]


async def test_one_that_is_refused_takes_the_others_with_it() -> None:
    client = Client()
    with pytest.raises(QueueFull):
        await submission(client, "a", "full", "old")
    assert client.cancelled == ["job-a"]


async def test_who_asks_again_leaves_the_others() -> None:
    client = Client()
    with pytest.raises(QueueFull):
        await submission(client, "a", "full", cancels_partial=False)
    assert client.cancelled == []
