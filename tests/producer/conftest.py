"""A worker without an engine, one with a stand-in for it, gateways, and clients of the server."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient, Client
from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import Event, FinishReason, Job, Terminal, Timings, Usage
from inferq.protocol.replies import ClaimedJob, PublishItem, PublishReply
from inferq.protocol.scripts import QueueScripts

LEASE_MS = 10_000
RETENTION_MS = 60_000


class FakeWorker:
    """Claims jobs and publishes what the test says, through the real scripts."""

    def __init__(self, client: redis.asyncio.Redis, queue: str) -> None:
        self.client = client
        self.keys = QueueKeys(queue)
        self.scripts = QueueScripts(client, self.keys)
        self.name = "fake"

    async def claim(self, *, max_jobs: int = 1) -> list[ClaimedJob]:
        reply = await self.scripts.claim(
            self.name,
            free_tokens=10**9,
            idle=True,
            max_jobs=max_jobs,
            max_model_len=10**6,
            block_size=16,
            lease_ms=LEASE_MS,
            max_crashes=3,
            retention_ms=RETENTION_MS,
        )
        return list(reply.claimed)

    async def wait_for_jobs(self, count: int = 1, *, at_once: int = 100) -> list[ClaimedJob]:
        """Claim until there are `count` jobs."""
        jobs: list[ClaimedJob] = []
        async with asyncio.timeout(30):
            while len(jobs) < count:
                jobs += await self.claim(max_jobs=at_once)
                await asyncio.sleep(0.005)
        return jobs

    async def claim_one(self) -> tuple[ClaimedJob, Job]:
        (claimed,) = await self.claim()
        return claimed, Job.decode(claimed.payload)

    async def publish(
        self,
        claimed: ClaimedJob,
        first: int,
        *events: Event,
        terminal: FinishReason | None = None,
    ) -> PublishReply:
        total, items = first, []
        for event in events:
            total += len(event.token_ids)
            items.append((total, event.encode()))
        item = PublishItem(claimed.job_id, claimed.epoch, first, tuple(items), terminal)
        (reply,) = await self.scripts.publish(
            self.name, [item], lease_ms=LEASE_MS, retention_ms=RETENTION_MS
        )
        return reply

    async def serve(self, claimed: ClaimedJob, count: int, *, each: int = 1) -> None:
        """Publish `count` tokens 0, 1, … in events of `each`, then the end."""
        for first in range(0, count, each):
            reply = await self.publish(claimed, first, words(first, min(first + each, count)))
            assert reply.status == "ok"
        await self.publish(claimed, count, ending(count), terminal=FinishReason.LENGTH)


def words(first: int, end: int) -> Event:
    """Tokens first to end - 1, each with its number and a space as text."""
    text, ends = "", []
    for token in range(first, end):
        text += f"{token} "
        ends.append(len(text))
    return Event(offset=first, token_ids=tuple(range(first, end)), text=text, text_ends=tuple(ends))


def ending(count: int, reason: FinishReason = FinishReason.LENGTH, text: str = "") -> Event:
    """The terminal event after `count` tokens."""
    return Event(
        offset=count,
        text=text,
        finish_reason=reason,
        terminal=Terminal(reason, Usage(3, 1, count), Timings(5, 6, 7), attempts=1),
    )


@pytest.fixture(name="words")
def words_fixture() -> Callable[[int, int], Event]:
    return words


@pytest.fixture(name="ending")
def ending_fixture() -> Callable[..., Event]:
    return ending


@pytest.fixture
def own_server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """A server that the test may empty, stop and restart; keeps its data.

    Valkey, or as the indirect parameter says.
    """
    binary = None
    if getattr(request, "param", "valkey") == "redis":
        request.getfixturevalue("redis_server")  # skips, or fails, where there is none
        binary = shutil.which("redis-server")
    settings = {"appendfsync": "always"}
    with EmbeddedServer(appendonly=True, settings=settings, binary=binary) as server:
        yield server


@pytest.fixture
async def fake_worker(queue: str) -> AsyncIterator[Callable[[str], FakeWorker]]:
    """Fake workers on any server."""
    async with AsyncExitStack() as stack:

        def make(url: str) -> FakeWorker:
            client = redis.asyncio.Redis.from_url(url)
            stack.push_async_callback(client.aclose)
            return FakeWorker(client, queue)

        yield make


@pytest.fixture
async def worker(valkey_client: redis.asyncio.Redis, queue: str) -> FakeWorker:
    return FakeWorker(valkey_client, queue)


@pytest.fixture
async def client(valkey_url: str, queue: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url, queue) as made:
        yield made


@pytest.fixture
def sync_client(valkey_url: str, queue: str) -> Iterator[Client]:
    with Client(valkey_url, queue) as made:
        yield made


class WorkerThread:
    """A fake worker on a loop of its own, for tests of plain code."""

    def __init__(self, url: str, queue: str) -> None:
        self._url = url
        self._queue = queue

    def serve_next(self, count: int) -> None:
        """Wait for a job and serve it `count` tokens."""
        self.serve_jobs(1, count)

    def serve_jobs(self, jobs: int, count: int) -> None:
        """Serve so many jobs `count` tokens each, as they come."""

        async def main() -> None:
            async with redis.asyncio.Redis.from_url(self._url) as connection:
                fake = FakeWorker(connection, self._queue)
                for _ in range(jobs):
                    (job,) = await fake.wait_for_jobs(1, at_once=1)
                    await fake.serve(job, count)

        asyncio.run(main())

    def answer_next(self, *events: Event) -> None:
        """Wait for a job and end it with these events."""

        async def main() -> None:
            async with redis.asyncio.Redis.from_url(self._url) as connection:
                fake = FakeWorker(connection, self._queue)
                (job,) = await fake.wait_for_jobs(1, at_once=1)
                await fake.publish(job, 0, *events, terminal=events[-1].terminal.finish_reason)

        asyncio.run(main())


@pytest.fixture
def worker_thread(valkey_url: str, queue: str) -> WorkerThread:
    return WorkerThread(valkey_url, queue)


@pytest.fixture
def make_client(queue: str) -> Iterator[Callable[..., Client]]:
    """Clients of any server, closed at the end."""
    with ExitStack() as stack:

        def make(url: str, **options: float) -> Client:
            return stack.enter_context(Client(url, queue, **options))  # type: ignore[arg-type]

        yield make


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Any:
    """The tokenizer of the small real model, with its chat template."""
    from stand_in_worker import load_tokenizer

    return load_tokenizer(smollm2)


@pytest.fixture
def start_stand_in(valkey_url: str, queue: str, tokenizer: Any) -> Iterator[Callable[..., Any]]:
    """Start workers (`queue`, `model`, `step_s`, … as `StandInWorker` takes them)."""
    from stand_in_worker import StandInWorker

    started: list[Any] = []

    def start(
        *, queue: str = queue, url: str = valkey_url, tokenizer: Any = tokenizer, **options: Any
    ) -> Any:
        worker = StandInWorker(url, queue, tokenizer, **options)
        started.append(worker.start())
        return worker

    yield start
    for worker in started:
        worker.stop()


@pytest.fixture
def start_gateway(valkey_url: str, queue: str) -> Iterator[Callable[..., Any]]:
    """Start gateways of `queue` on free ports, with further settings."""
    from stand_in_worker import RunningGateway

    from inferq.producer.gateway.settings import GatewaySettings

    started: list[Any] = []

    def start(**settings: Any) -> Any:
        given = {
            "redis_url": valkey_url,
            "queues": (queue,),
            "port": 0,
            "poll_interval_s": 0.1,
            "shutdown_timeout_s": 5.0,
            **settings,
        }
        running = RunningGateway(GatewaySettings(**given))
        started.append(running.start())
        return running

    yield start
    for running in started:
        running.stop()
