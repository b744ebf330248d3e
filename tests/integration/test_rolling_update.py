"""A rolling update in miniature: three workers replaced one by one under load, as Kubernetes would.

Each gets SIGTERM, drains for less than a job takes and hands over; its successor must be ready
before the next one goes.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from inferq import AsyncClient, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPTS = ("The lighthouse stood", "Seven rivers run", "In the kitchen")
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=96, ignore_eos=True)
DRAIN_S = 0.3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def status(port: int, path: str) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=10).status_code
    except httpx.ConnectError:
        return 0


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Load:
    """Streams jobs one after another for each prompt until told to stop."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._stop = asyncio.Event()
        self.attempts: list[int] = []

    async def stream(self, prompt: str) -> tuple[int, ...]:
        """Run one job; its offsets must be each there once. Return its tokens."""
        job = await self._client.submit(prompt, PARAMS)
        tokens: list[int] = []
        async for event in job.stream(timeout_s=300):
            assert event.offset == len(tokens)
            tokens.extend(event.token_ids)
        assert len(tokens) == PARAMS.max_tokens
        self.attempts.append((await job.result(timeout_s=30)).attempts)
        return tuple(tokens)

    async def repeat(self, prompt: str, expected: tuple[int, ...]) -> None:
        while not self._stop.is_set():
            assert await self.stream(prompt) == expected

    def stop(self) -> None:
        self._stop.set()


async def test_no_token_is_lost_or_repeated_while_all_workers_are_replaced(
    start_worker: Any, valkey_url: str, queue: str
) -> None:
    def start() -> tuple[Any, int]:
        port = free_port()
        options = {"drain_timeout_s": DRAIN_S, "health_port": port, "health_host": "127.0.0.1"}
        worker = start_worker(valkey_url, queue, wait=False, lease_s=10.0, **options)
        wait_until(lambda: status(port, "/readyz") == 200, 300)
        return worker, port

    def replace(worker: Any, port: int) -> tuple[Any, int]:
        assert status(port, "/livez") == 200
        worker.process.terminate()
        wait_until(lambda: status(port, "/readyz") != 200, 60)
        assert worker.process.wait(120) == 0
        return start()

    workers = [await asyncio.to_thread(start) for _ in range(3)]
    async with AsyncClient(valkey_url, queue=queue) as client:
        load = Load(client)
        expected = {prompt: await load.stream(prompt) for prompt in PROMPTS}
        async with asyncio.TaskGroup() as streams:
            for prompt in PROMPTS * 2:
                streams.create_task(load.repeat(prompt, expected[prompt]))
            for worker, port in workers:
                await asyncio.to_thread(replace, worker, port)
                for prompt in PROMPTS:
                    assert await load.stream(prompt) == expected[prompt]
            load.stop()
    assert max(load.attempts) > 1  # some jobs moved
