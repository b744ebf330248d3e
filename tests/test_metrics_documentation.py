"""docs/metrics.md has every metric that a process tells, and each process tells all it should."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from inferq.producer.gateway.app import create_app
from inferq.producer.gateway.settings import GatewaySettings
from inferq.producer.tasks.metrics import TasksMetrics
from inferq.producer.tasks.settings import TasksSettings
from inferq.producer.tasks.workers import WorkerProcesses
from inferq.runtime.metrics import MetricsPage
from inferq.worker.insight.books import WorkerBooks
from inferq.worker.insight.metrics import WorkerMetrics
from inferq.worker.insight.probes import WorkerProbes
from inferq.worker.pipe.engine_client import EngineClient
from inferq.worker.queue.running import RunningJobs

#: Sections of the page by process.
SECTIONS = {
    "worker": {"Worker", "Every process"},
    "gateway": {"Gateway", "Queue", "Every process"},
    "tasks": {"Tasks", "Queue", "Every process"},
}


async def worker_text(queue: str, _url: str) -> bytes:
    engine = EngineClient()
    probes = WorkerProbes(engine, asyncio.Event(), step_timeout_s=60)
    metrics = WorkerMetrics(engine, probes, WorkerBooks(), queue=queue, model_name="m")
    metrics.loaded(RunningJobs(1024, 16, 8))
    return (await MetricsPage("1", metrics.collect).answer(""))[1]


async def gateway_text(queue: str, url: str) -> bytes:
    settings = GatewaySettings(queues=(queue,), redis_url=url)  # type: ignore[arg-type]
    gateway = create_app(settings).state.gateway
    try:
        return bytes((await gateway.metrics.page.answer(""))[1])
    finally:
        for client in gateway.clients.values():
            await client.aclose()


async def tasks_text(queue: str, url: str) -> bytes:
    settings = TasksSettings(queues=(queue,), redis_url=url)  # type: ignore[arg-type]
    metrics = TasksMetrics(settings, WorkerProcesses(settings))
    try:
        return (await metrics.page.answer(""))[1]
    finally:
        await metrics.aclose()


TEXTS = {"worker": worker_text, "gateway": gateway_text, "tasks": tasks_text}


@pytest.mark.parametrize("process", TEXTS)
async def test_a_process_tells_what_the_page_says_and_nothing_else(
    process: str, queue: str, valkey_url: str, metrics_text: Any
) -> None:
    scrape = metrics_text.Scrape((await TEXTS[process](queue, valkey_url)).decode())
    rows = metrics_text.documented()
    expected = {n: row.kind for n, row in rows.items() if row.section in SECTIONS[process]}
    assert scrape.names == expected
    metrics_text.check_against_page(scrape, more=metrics_text.WORKER_LABELS)
    for name, row in rows.items():
        for label, values in row.labels.items():
            told = set(label_values(scrape, name, label))
            assert not told or values is None or told == values, f"{name}: {label}"


def label_values(scrape: Any, name: str, label: str) -> Iterator[str]:
    for sample, labels in scrape.series:
        if sample == name and label in dict(labels):
            yield dict(labels)[label]


def test_every_section_of_the_page_belongs_to_a_process(metrics_text: Any) -> None:
    sections = {row.section for row in metrics_text.documented().values()}
    assert sections == set().union(*SECTIONS.values())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# TYPE inferq_secret gauge\ninferq_secret 1\n", "does not have inferq_secret"),
        ('# TYPE inferq_jobs_held gauge\ninferq_jobs_held{job="x"} 1\n', "inferq_jobs_held"),
        (
            '# TYPE inferq_queue_depth gauge\ninferq_queue_depth{lane="x"} 1\n',
            "inferq_queue_depth: lane=x",
        ),
    ],
)
def test_what_is_not_documented_would_be_found(
    text: str, complaint: str, metrics_text: Any
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        metrics_text.check_against_page(metrics_text.Scrape(text))


def test_queries_of_the_page_name_metrics_that_exist(metrics_text: Any) -> None:
    rows = metrics_text.documented()
    queries = metrics_text.PAGE.read_text().partition("## Queries")[2].partition("## Cost")[0]
    named = set(metrics_text.NAME.findall(queries))
    assert named
    for name in named:
        base = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        assert name in rows or rows[base].kind == "histogram", name
