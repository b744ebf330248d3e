"""What a worker tells at /metrics of its jobs, tokens and leases; the test brings the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
from hand_worker import TIMEOUT_S, HandEngine

from inferq import AsyncClient, JobFailed, SamplingParams
from inferq.protocol.keys import Lane, QueueKeys, new_job_id
from inferq.protocol.messages import FinishReason
from inferq.protocol.scripts import QueueScripts
from inferq.runtime.health import HealthServer
from inferq.worker import service
from inferq.worker.service import WorkerService
from inferq.worker.settings import WorkerSettings

pytestmark = pytest.mark.model

PROMPT = [5, 6, 7]


class Worker:
    """A worker of the test's queue, in the test's own process."""

    def __init__(
        self,
        settings: WorkerSettings,
        servers: Mapping[int, HealthServer],
        parse: Callable[[str], Any],
    ) -> None:
        self.engine = HandEngine()
        self._servers = servers
        self._number = settings.health_port
        self._parse = parse
        self._task = asyncio.create_task(WorkerService(settings, self.engine).run())

    async def get(self, path: str) -> httpx.Response:
        port = self._servers[self._number].port
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            return await client.get(f"http://127.0.0.1:{port}{path}")

    async def scrape(self) -> Any:
        answer = await self.get("/metrics")
        assert answer.status_code == 200
        return self._parse(answer.text)

    async def scrape_when(self, holds: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            while not holds(scrape := await self.scrape()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return scrape

    async def answers(self, path: str) -> None:
        """Wait until a probe succeeds."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                assert not self._task.done(), self._task.result()
                with suppress(httpx.ConnectError, KeyError):
                    if (await self.get(path)).status_code == 200:
                        return
                await asyncio.sleep(0.02)

    async def die(self) -> None:
        """End as a killed process does: nothing is handed back, no lease is renewed."""
        while not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task], timeout=0.5)


@pytest.fixture
async def start_worker(
    valkey_url: str,
    queue: str,
    smollm2: Path,
    metrics_text: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Callable[..., Worker]]:
    started: list[Worker] = []
    servers: dict[int, HealthServer] = {}

    def serve(checks: Any, *, port: int, **options: Any) -> HealthServer:
        """Take any free port for the one that the settings name."""
        servers[port] = HealthServer(checks, port=0, **options)
        return servers[port]

    monkeypatch.setattr(service, "HealthServer", serve)

    def start(**settings: Any) -> Worker:
        given = {
            "model": str(smollm2),
            "served_model_name": "hand",
            "redis_url": valkey_url,
            "queue": queue,
            "worker_name": f"worker-{len(started)}",
            "health_port": len(started) + 1,
            "health_host": "127.0.0.1",
            **settings,
        }
        started.append(Worker(WorkerSettings(**given), servers, metrics_text.Scrape))
        return started[-1]

    yield start
    for worker in started:
        await worker.die()


@pytest.fixture
async def client(valkey_url: str, queue: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url, queue) as made:
        yield made


def asked(**params: Any) -> SamplingParams:
    return SamplingParams(seed=0, ignore_eos=True, **params)


async def test_a_worker_tells_what_it_did_and_nothing_more(
    start_worker: Callable[..., Worker],
    client: AsyncClient,
    valkey_client: redis.asyncio.Redis,
    queue: str,
    metrics_text: Any,
) -> None:
    worker = start_worker(lease_s=600, retention_s=1200)  # heartbeats would tell of cancels too
    await worker.answers("/livez")
    loading = await worker.scrape()
    assert loading.value("inferq_worker_ready") == 0
    assert "inferq_num_requests_running" not in loading.names
    worker.engine.may_start.set()
    await worker.answers("/readyz")
    bring = worker.engine.bring

    # five tokens in three lots, the last with the end
    plain = await client.submit(PROMPT, asked(max_tokens=5))
    name = await worker.engine.wait_for(plain.id)
    held = await worker.scrape()
    assert held.value("inferq_jobs_held") == 1
    assert held.value("inferq_kv_tokens_reserved") == 16
    bring(name, 10)
    bring(name, 11, 12)
    bring(name, 13, 14, end=FinishReason.LENGTH)
    usage = (await plain.result(timeout_s=TIMEOUT_S)).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 5)
    # two outputs of two tokens
    two = await client.submit(PROMPT, asked(max_tokens=2, n=2), lane=Lane.HIGH)
    name = await worker.engine.wait_for(two.id)
    for index in (0, 1):
        bring(name, 20, index=index)
    for index in (0, 1):
        bring(name, 21, index=index, end=FinishReason.LENGTH, is_last=index == 1)
    await two.result(timeout_s=TIMEOUT_S)
    # one that is cancelled before it has a token
    cancelled = await client.submit(PROMPT, asked(max_tokens=2), lane=Lane.LOW)
    name = await worker.engine.wait_for(cancelled.id)
    await cancelled.cancel()
    bring(name, 30)  # the publish that this makes tells of the cancel
    # one that nobody can decode
    scripts = QueueScripts(valkey_client, QueueKeys(queue))
    junk = new_job_id()
    await scripts.enqueue_payload(
        junk,
        b"junk",
        digest="x",
        lane=Lane.NORMAL,
        prompt_tokens=1,
        budget=1,
        queue_limit=10,
        retention_ms=60_000,
    )
    with pytest.raises(JobFailed):
        await client.job(junk).result(timeout_s=TIMEOUT_S)

    scrape = await worker.scrape_when(lambda s: s.value("inferq_jobs_held") == 0)
    metrics_text.check_against_page(scrape, more=metrics_text.WORKER_LABELS)
    for series in scrape.series:
        name, labels = series
        if name.startswith("inferq_") and name != "inferq_build_info":
            assert {"queue": queue, "model_name": "hand"}.items() <= dict(labels).items()
    values = {
        "inferq_worker_ready": 1,
        "inferq_generation_tokens_total": 5 + 4 + 1,
        "inferq_prompt_tokens_total": 3 * 3,
        "inferq_job_takeovers_total": 0,
        "inferq_jobs_rejected_total": 1,
        "inferq_jobs_lost_total": 0,
        "inferq_jobs_handed_back_total": 0,
        "inferq_kv_tokens_reserved": 0,
        "inferq_request_queue_time_seconds_count": 4,
        "inferq_time_to_first_token_seconds_count": 3,
        "inferq_inter_token_latency_seconds_count": 4 + 2,
        "inferq_e2e_request_latency_seconds_count": 2,
        "inferq_published_event_tokens_sum": 5 + 4 + 1,
    }
    assert {name: scrape.value(name) for name in values} == values
    for lane, count in {"high": 1, "normal": 2, "low": 1}.items():
        assert scrape.value("inferq_job_deliveries_total", lane=lane) == count
    ended = {"length": 2, "cancelled": 1, "stop": 0, "expired": 0, "error": 0}
    for reason, count in ended.items():
        assert scrape.value("inferq_jobs_ended_total", finish_reason=reason) == count
    keys = QueueKeys(queue)
    events = [await valkey_client.xlen(keys.out(job.id)) for job in (plain, two, cancelled)]
    assert scrape.value("inferq_published_event_tokens_count") == sum(events)
    assert scrape.value("inferq_publish_calls_total", outcome="failed") == 0
    assert scrape.value("inferq_publish_calls_total", outcome="ok") > 0
    assert scrape.values("inferq_fenced_writes_total") == dict.fromkeys(
        scrape.values("inferq_fenced_writes_total"), 0
    )


async def begun(
    worker: Worker, client: AsyncClient, valkey_client: redis.asyncio.Redis, queue: str
) -> str:
    """Let a worker publish two tokens of a job; return the job."""
    worker.engine.may_start.set()
    await worker.answers("/readyz")
    handle = await client.submit(PROMPT, asked(max_tokens=4))
    worker.engine.bring(await worker.engine.wait_for(handle.id), 10, 11)
    async with asyncio.timeout(TIMEOUT_S):
        while not await valkey_client.exists(QueueKeys(queue).out(handle.id)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return handle.id


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_dead_workers_job_is_a_takeover_of_the_next_one(
    start_worker: Callable[..., Worker],
    client: AsyncClient,
    valkey_client: redis.asyncio.Redis,
    queue: str,
    comes_back: bool,
) -> None:
    lease = {"lease_s": 600, "retention_s": 1200}
    first = start_worker(**lease)
    job_id = await begun(first, client, valkey_client, queue)
    assert (await first.scrape()).value("inferq_generation_tokens_total") == 2
    await first.die()

    if not comes_back:  # who does says that its jobs are free; else the lease must end
        await valkey_client.zadd(QueueKeys(queue).leases, {job_id: 1})
    name = "worker-0" if comes_back else "another"
    second = start_worker(worker_name=name, **lease)
    second.engine.may_start.set()
    name = await second.engine.wait_for(job_id, epoch=2)
    second.engine.bring(name, 12, 13, end=FinishReason.LENGTH)
    result = await client.job(job_id).result(timeout_s=TIMEOUT_S)
    assert result.usage.completion_tokens == 4
    scrape = await second.scrape_when(lambda s: s.value("inferq_jobs_held") == 0)
    values = {
        "inferq_job_takeovers_total": 1,
        "inferq_generation_tokens_total": 2,  # its own alone
        "inferq_prompt_tokens_total": 3,
        # nobody knows the whole of what it waited
        "inferq_request_queue_time_seconds_count": 0,
        "inferq_time_to_first_token_seconds_count": 0,
        "inferq_e2e_request_latency_seconds_count": 0,
    }
    assert {name: scrape.value(name) for name in values} == values
    assert scrape.value("inferq_job_deliveries_total", lane="normal") == 1
    assert scrape.value("inferq_jobs_ended_total", finish_reason="length") == 1


@pytest.mark.parametrize("operation", ["publish", "heartbeat"])
async def test_writes_of_a_worker_whose_job_another_has_are_fenced(
    start_worker: Callable[..., Worker],
    client: AsyncClient,
    valkey_client: redis.asyncio.Redis,
    queue: str,
    operation: str,
) -> None:
    # seconds between two heartbeats are a quarter of it: one comes soon, or none
    worker = start_worker(lease_s=8 if operation == "heartbeat" else 600, retention_s=1200)
    job_id = await begun(worker, client, valkey_client, queue)
    await give_to_another(valkey_client, queue, job_id)
    if operation == "publish":
        worker.engine.bring(f"{job_id}:1", 12)
    scrape = await worker.scrape_when(lambda s: s.value("inferq_jobs_lost_total") == 1)
    for name in ("publish", "heartbeat"):
        fenced = scrape.value("inferq_fenced_writes_total", operation=name)
        assert fenced == (name == operation)
    assert scrape.value("inferq_jobs_held") == 0
    assert scrape.value("inferq_published_event_tokens_sum") == 2


async def give_to_another(client: redis.asyncio.Redis, queue: str, job_id: str) -> None:
    """End the lease of a job, and have another worker claim it."""
    keys = QueueKeys(queue)
    await client.zadd(keys.leases, {job_id: 1})
    reply = await QueueScripts(client, keys).claim(
        "thief",
        free_tokens=10_000,
        idle=True,
        max_jobs=1,
        max_model_len=1024,
        block_size=16,
        lease_ms=600_000,
        max_crashes=3,
        retention_ms=1_200_000,
    )
    assert [claimed.job_id for claimed in reply.claimed] == [job_id]
