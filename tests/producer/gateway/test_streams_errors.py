"""What fails in the middle of a stream is an event of it; the other jobs of the request end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from inferq import AsyncClient, ErrorCode, FinishReason
from inferq.protocol.errors import ErrorInfo
from inferq.protocol.messages import Event, Terminal
from inferq.protocol.replies import JobState


@pytest.fixture
async def http(start_gateway: Callable[..., Any], queue: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway whose only worker is the test's own."""
    gateway = start_gateway(models={"m": queue}, accept_without_workers=True)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30) as made:
        yield made


def failure(offset: int, code: str) -> Event:
    error = ErrorInfo(code, "secret details")
    return Event(offset=offset, terminal=Terminal(FinishReason.ERROR, error=error))


async def test_a_failure_in_mid_stream_is_an_event_and_shows_nothing_of_our_own(
    http: httpx.AsyncClient, worker: Any, words: Callable[[int, int], Event]
) -> None:
    asked = {"prompt": "Hi", "max_tokens": 9, "stream": True}
    asking = asyncio.create_task(http.post("/v1/completions", json=asked))
    [claimed] = await worker.wait_for_jobs()
    await worker.publish(claimed, 0, words(0, 2))
    await worker.publish(
        claimed, 2, failure(2, ErrorCode.WORKER_CRASHED), terminal=FinishReason.ERROR
    )
    answer = await asking
    assert answer.status_code == 200
    *chunks, error, done = [
        line.removeprefix("data: ") for line in answer.text.splitlines() if line[:6] == "data: "
    ]
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == "0 1 "
    assert json.loads(error)["error"]["code"] == "worker_crashed"
    assert done == "[DONE]"
    assert "secret" not in answer.text


@pytest.mark.parametrize("is_stream", [False, True])
async def test_one_job_that_fails_takes_the_others_of_its_request_with_it(
    http: httpx.AsyncClient, worker: Any, client: AsyncClient, is_stream: bool
) -> None:
    asked = {"prompt": ["A", "B", "C"], "max_tokens": 9, "stream": is_stream}
    asking = asyncio.create_task(http.post("/v1/completions", json=asked))
    claims = await worker.wait_for_jobs(3)
    await worker.publish(claims[1], 0, failure(0, ErrorCode.INTERNAL), terminal=FinishReason.ERROR)
    answer = await asking
    assert answer.status_code == 500
    assert "secret" not in answer.text
    for claimed in claims:
        status = await client.status(claimed.job_id)
        assert status.cancel_requested or status.state is JobState.DONE


async def test_a_job_without_a_worker_waits_and_may_be_cancelled(
    http: httpx.AsyncClient, client: AsyncClient
) -> None:
    asked = {"model": "m", "prompt": "Hi", "cancel_on_disconnect": True}
    asking = asyncio.create_task(http.post("/v1/completions", json=asked))
    async with asyncio.timeout(30):
        while not (await client.queue_length()).waiting:  # noqa: ASYNC110 - another loop's work
            await asyncio.sleep(0.01)
        asking.cancel()
        while (await client.queue_length()).waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await asking
