"""What a tasks process tells of its deliveries, its tasks and its queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing import get_context
from typing import Any

import pytest
import redis

from inferq import Client, Webhook
from inferq.producer.tasks.counts import PLACES, TASK_NAMES, Counted, TaskCounts
from inferq.producer.tasks.duties import Duties
from inferq.producer.tasks.metrics import TasksMetrics
from inferq.producer.tasks.safe_rq import TaskRefused
from inferq.producer.tasks.settings import TasksSettings
from inferq.producer.tasks.workers import WorkerProcesses, perform_tasks
from inferq.protocol.keys import TaskKeys
from inferq.runtime import figures


@pytest.fixture
async def told(metrics_text: Any) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Scrapes the metrics of a tasks process with some settings."""
    made: list[TasksMetrics] = []

    async def scrape(settings: TasksSettings) -> Any:
        if not made:
            made.append(TasksMetrics(settings, WorkerProcesses(settings)))
        _, text = await made[0].page.answer("")
        return metrics_text.Scrape(text.decode())

    yield scrape
    for metrics in made:
        await metrics.aclose()


async def told_when_up(told: Callable[..., Awaitable[Any]], settings: TasksSettings) -> Any:
    """What is told once every queue could be read: a busy machine may need several tries."""
    async with asyncio.timeout(60):
        while True:
            scrape = await told(settings)
            if all(scrape.values("inferq_queue_up").values()):
                return scrape


def test_there_is_a_place_for_each_task(settings: TasksSettings) -> None:
    assert set(Duties(settings).tasks) == set(TASK_NAMES)
    assert len(set(PLACES)) == len(PLACES)


def test_counts_in_shared_memory_are_seen_by_others() -> None:
    context = get_context("spawn")
    counts = TaskCounts.shared(context)
    process = context.Process(target=TaskCounts.kept, args=(counts, 3, 1))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert counts.read(Counted.LINE) == {("completed",): 3, ("failed",): 1}


async def test_a_task_is_counted_by_how_it_ends() -> None:
    counts = TaskCounts()

    async def sweep(how: str) -> None:
        if how == "refused":
            raise TaskRefused("not ours")
        if how == "failed":
            raise OSError("no")

    counted = counts.around({"sweep": sweep})["sweep"]
    await counted("done")
    with pytest.raises(OSError, match="no"):
        await counted("failed")
    with pytest.raises(TaskRefused):
        await counted("refused")
    ends = counts.read(Counted.RUN)
    assert (ends["sweep", "done"], ends["sweep", "failed"]) == (1, 1)
    assert sum(ends.values()) == 2


def test_what_is_performed_is_told_exactly(
    make_settings: Callable[..., TasksSettings],
    burst_until: Callable[..., None],
    end_job: Callable[..., str],
    receiver: Any,
    make_answer: Callable[..., Any],
    plain_redis: redis.Redis,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    metrics_text: Any,
) -> None:
    monkeypatch.setattr(figures, "STANDS_S", 0)
    settings = make_settings(webhook_retry_delays_s="0.01", sweep_interval_s=3600)
    processes = WorkerProcesses(settings)
    [counts] = processes.counts

    def counted(settings: TasksSettings, *, burst: bool) -> None:
        perform_tasks(settings, burst=burst, counts=counts)

    monkeypatch.setattr("inferq.producer.tasks.command.perform_tasks", counted)
    receiver.answers = [make_answer(200), make_answer(500), make_answer(410), make_answer(200)]
    for _ in range(3):
        end_job()
    plain_redis.hset(
        f"{TaskKeys.RQ_PREFIX}:job:bad",
        mapping={"data": '["os.system", null, ["true"], {}]', "origin": queue},
    )
    plain_redis.rpush(f"{TaskKeys.RQ_PREFIX}:queue:{queue}", "bad")

    async def told_once() -> Any:
        metrics = TasksMetrics(settings, processes)

        async def told(_: TasksSettings) -> Any:
            _, text = await metrics.page.answer("")
            return metrics_text.Scrape(text.decode())

        try:
            return await told_when_up(told, settings)
        finally:
            await metrics.aclose()

    def all_ended() -> bool:
        ended = counts.read(Counted.ATTEMPT)
        return ended["delivered",] + ended["dead",] == 3

    burst_until(all_ended, settings)
    scrape = asyncio.run(told_once())
    metrics_text.check_against_page(scrape)
    for outcome, number in {"delivered": 2, "retry": 1, "dead": 1, "postponed": 0}.items():
        assert scrape.value("inferq_webhook_attempts_total", outcome=outcome) == number
    assert scrape.value("inferq_task_runs_total", outcome="refused") == 1
    assert scrape.value("inferq_task_runs_total", task="sweep", outcome="done") == 1
    assert scrape.value("inferq_task_runs_total", task="deliver_webhooks", outcome="done") >= 1
    assert scrape.value("inferq_webhooks_dead", queue=queue) == 1
    assert scrape.value("inferq_webhooks_due", queue=queue) == 0
    assert scrape.value("inferq_queue_jobs_ended_total", queue=queue) == 3


async def test_two_queues_are_told_apart_and_nobody_is_asked_twice(
    make_settings: Callable[..., TasksSettings],
    make_client: Callable[..., Client],
    valkey_url: str,
    queue: str,
    told: Callable[..., Awaitable[Any]],
    receiver: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = f"{queue}-other"
    settings = make_settings(queues=(queue, other))
    client = make_client(valkey_url)
    await asyncio.to_thread(client.submit, "x", lane="high", webhook=Webhook(receiver.url))
    with Client(valkey_url, other) as second:
        cancelled = await asyncio.to_thread(second.submit, "x", webhook=Webhook(receiver.url))
        await asyncio.to_thread(cancelled.cancel)
    monkeypatch.setattr(figures, "STANDS_S", 0)
    scrape = await told_when_up(told, settings)
    assert scrape.value("inferq_queue_depth", queue=queue, lane="high") == 1
    assert scrape.value("inferq_queue_jobs", queue=queue, state="queued") == 1
    assert scrape.value("inferq_queue_outstanding_tokens", queue=queue, kind="prompt") > 0
    assert scrape.value("inferq_webhooks_unmoved", queue=queue) == 0
    assert scrape.value("inferq_queue_jobs", queue=other, state="queued") == 0
    assert scrape.value("inferq_webhooks_unmoved", queue=other) == 1
    assert scrape.values("inferq_queue_up") == {(("queue", name),): 1 for name in (queue, other)}
    monkeypatch.setattr(figures, "STANDS_S", 1e9)
    await asyncio.to_thread(client.submit, "x", lane="high")
    again = await told(settings)
    assert again.value("inferq_queue_depth", queue=queue, lane="high") == 1
    monkeypatch.setattr(figures, "STANDS_S", 0)
    later = await told_when_up(told, settings)
    assert later.value("inferq_queue_depth", queue=queue, lane="high") == 2


async def test_a_server_that_is_away_leaves_no_figures(
    make_settings: Callable[..., TasksSettings],
    own_server: Any,
    queue: str,
    told: Callable[..., Awaitable[Any]],
    monkeypatch: pytest.MonkeyPatch,
    metrics_text: Any,
) -> None:
    monkeypatch.setattr(figures, "STANDS_S", 0)
    settings = make_settings(redis_url=own_server.url)
    await told_when_up(told, settings)
    await asyncio.to_thread(own_server.kill)
    away = await told(settings)
    assert away.value("inferq_queue_up", queue=queue) == 0
    named = {name for name, labels in away.series if ("queue", queue) in labels}
    assert named == {"inferq_queue_up"}
    assert away.value("inferq_tasks_workers") == 0
    await asyncio.to_thread(own_server.restart)
    metrics_text.check_against_page(await told_when_up(told, settings))
