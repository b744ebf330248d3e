"""Snapshots and reports of a worker: only while watched, bounded, and through a server's outage."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio
from structlog.testing import capture_logs

from inferq.protocol.errors import ServerLost
from inferq.protocol.keys import QueueKeys
from inferq.protocol.replies import Registered
from inferq.protocol.snapshots import BlockSnapshot
from inferq.protocol.watching import read_snapshot
from inferq.worker.insight import snapshots as snapshots_module
from inferq.worker.insight.reports import Reporter, TokenRates
from inferq.worker.insight.snapshots import Snapshots
from inferq.worker.jobs.books import JobBooks
from inferq.worker.pipe.engine_client import EngineInfo
from inferq.worker.settings import WorkerSettings

SNAPSHOT = BlockSnapshot(4, 0, [4, 0, 0, 0], [])
INFO = EngineInfo(num_blocks=4, block_size=16, max_model_len=64, vocab_size=10)


class AskedEngine:
    """Counts how often it is asked what its blocks hold."""

    def __init__(self) -> None:
        self.asked = 0
        self.seconds = 0.0
        self.stats: dict[str, int] = {"running": 2, "swap_blocks_used": 3}

    async def block_snapshot(self) -> tuple[float, bytes]:
        self.asked += 1
        return self.seconds, SNAPSHOT.encode()


async def until(is_so: Any) -> None:
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "INTERVAL_S", 0.01)
    monkeypatch.setattr(snapshots_module, "LIVES", 6_000)


@pytest.mark.usefixtures("quick")
async def test_an_engine_is_asked_only_while_somebody_watches(
    valkey_client: redis.asyncio.Redis, queue: str
) -> None:
    engine, keys = AskedEngine(), QueueKeys(queue)
    snapshots = Snapshots(valkey_client, keys, "w", engine)  # type: ignore[arg-type]
    running = asyncio.create_task(snapshots.run())
    await asyncio.sleep(0)
    assert engine.asked == 0
    snapshots.watch(True)
    await until(lambda: engine.asked > 2)
    assert await read_snapshot(valkey_client, keys, "w") == SNAPSHOT
    assert 0 < await valkey_client.pttl(keys.blocks("w")) <= 60_000
    snapshots.watch(False)
    assert not snapshots.is_watched
    await valkey_client.delete(keys.blocks("w"))
    asked = engine.asked
    await asyncio.sleep(0.1)  # many times the interval
    assert engine.asked <= asked + 1  # the one that was under way
    running.cancel()


@pytest.mark.usefixtures("quick")
async def test_large_snapshots_come_less_often_and_live_longer(
    valkey_client: redis.asyncio.Redis, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_module, "BYTES_PER_S", len(SNAPSHOT.encode()) / 3600)
    engine, keys = AskedEngine(), QueueKeys(queue)
    snapshots = Snapshots(valkey_client, keys, "w", engine)  # type: ignore[arg-type]
    snapshots.watch(True)
    running = asyncio.create_task(snapshots.run())
    async with asyncio.timeout(60):
        while not await valkey_client.exists(keys.blocks("w")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await valkey_client.pttl(keys.blocks("w")) > 60_000
    assert engine.asked == 1
    running.cancel()


@pytest.mark.usefixtures("quick")
async def test_snapshots_that_hold_the_engine_up_come_less_often(
    valkey_client: redis.asyncio.Redis, queue: str
) -> None:
    engine, keys = AskedEngine(), QueueKeys(queue)
    engine.seconds = 60.0
    snapshots = Snapshots(valkey_client, keys, "w", engine)  # type: ignore[arg-type]
    snapshots.watch(True)
    running = asyncio.create_task(snapshots.run())
    async with asyncio.timeout(60):
        while not await valkey_client.exists(keys.blocks("w")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await valkey_client.pttl(keys.blocks("w")) > 60_000
    assert engine.asked == 1
    running.cancel()


class Scripts:
    """A server whose answers the test gives; an error is raised."""

    def __init__(self, *answers: Registered | Exception) -> None:
        self.answers = list(answers)
        self.reports: list[dict[str, Any]] = []

    async def register(self, worker: str, info: dict[str, Any]) -> Registered:
        self.reports.append(info)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def reporter_of(scripts: Scripts, **settings: Any) -> tuple[Reporter, Any]:
    watching = SimpleNamespace(is_watched=False)
    watching.watch = lambda is_watched: setattr(watching, "is_watched", is_watched)
    given = WorkerSettings(model="m", worker_name="w", **settings)
    engine, books = AskedEngine(), JobBooks()
    books.generation_tokens, books.prompt_tokens = 70, 30
    reporter = Reporter(given, scripts, engine, INFO, watching, books)  # type: ignore[arg-type]
    return reporter, watching


async def test_reports_come_every_second_while_watched_and_tell_when_the_next_one_comes() -> None:
    watched = Registered(0, drain=False, watched=True)
    scripts = Scripts(watched, ServerLost("away"), watched)
    reporter, watching = reporter_of(scripts, report_interval_s=60.0)
    running = asyncio.create_task(reporter.run(asyncio.Event()))
    await until(lambda: scripts.reports)
    await until(lambda: watching.is_watched)
    await until(lambda: len(scripts.reports) == 2)  # sooner than in the minute that was said
    first, second = scripts.reports
    assert (first["every"], second["every"]) == (60_000, 1_000)
    assert (first["generated_tokens"], first["prompt_tokens"]) == (70, 30)
    assert first["swap_blocks_used"] == 3
    assert not reporter.is_connected
    assert not watching.is_watched  # nobody knows: nothing is written for nobody
    running.cancel()


async def test_a_worker_that_is_watched_no_more_says_so_before_it_reports_less_often() -> None:
    watched, unwatched = (Registered(0, drain=False, watched=each) for each in (True, False))
    scripts = Scripts(watched, unwatched)
    reporter, _ = reporter_of(scripts, report_interval_s=60.0)
    running = asyncio.create_task(reporter.run(asyncio.Event()))
    await until(lambda: len(scripts.reports) == 3)
    assert [report["every"] for report in scripts.reports] == [60_000, 1_000, 60_000]
    running.cancel()


async def test_a_worker_that_is_told_to_stop_reports_that_it_drains_at_once() -> None:
    scripts = Scripts(Registered(0, drain=False, watched=False))
    reporter, _ = reporter_of(scripts, report_interval_s=60.0)
    stop = asyncio.Event()
    running = asyncio.create_task(reporter.run(stop))
    await until(lambda: scripts.reports)
    stop.set()
    await until(lambda: len(scripts.reports) == 2)
    assert [report["draining"] for report in scripts.reports] == [False, True]
    running.cancel()


async def test_a_queue_that_asks_for_a_drain_stops_the_worker() -> None:
    scripts = Scripts(Registered(0, drain=True, watched=False))
    reporter, _ = reporter_of(scripts, report_interval_s=60.0)
    stop = asyncio.Event()
    running = asyncio.create_task(reporter.run(stop))
    assert await asyncio.wait_for(stop.wait(), 60)
    running.cancel()


async def test_a_name_that_two_processes_report_under_is_told_by_whoever_finds_the_others() -> None:
    mine, anothers = (Registered(0, drain=False, watched=True, contested=c) for c in (False, True))
    # what an earlier process of this name left behind is no news
    scripts = Scripts(anothers, mine, anothers)
    reporter, _ = reporter_of(scripts, report_interval_s=0.05)
    with capture_logs() as lines:
        running = asyncio.create_task(reporter.run(asyncio.Event()))
        await until(lambda: len(scripts.reports) == 2)
        assert not lines
        await until(lambda: len(scripts.reports) == 5)
        running.cancel()
    [line] = lines
    assert line["log_level"] == "error"
    assert "another process has this worker's name" in line["event"]
    assert len({report["process"] for report in scripts.reports}) == 1


def test_rates_are_growth_by_time_and_none_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("inferq.worker.insight.reports.time.monotonic", lambda: now)
    rates = TokenRates()
    now = 101.0
    assert rates.since_last(50, 500) == [0.0, 0.0]
    now = 105.0
    assert rates.since_last(60, 900) == [2.5, 100.0]
    now = 105.0
    assert rates.since_last(60, 900) == [0.0, 0.0]
