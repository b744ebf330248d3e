"""`inferq doctor` looks at a queue: its workers, what waits, what nobody could serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from inferq.producer import AsyncClient
from inferq.protocol.keys import Lane
from inferq.protocol.replies import LaneOverview, Load, QueueOverview
from inferq.protocol.scripts import QueueScripts
from inferq.version import __version__

Doctor = Callable[..., tuple[int, dict[tuple[str, str], dict[str, Any]]]]
REPORT = {"model": "m", "version": __version__, "free": 7}


def test_a_served_queue_is_healthy(doctor: Doctor, on_queue: Callable[..., Any]) -> None:
    on_queue(lambda scripts, _: scripts.register("w", REPORT))
    code, findings = doctor("--only", "queue")
    assert code == 0
    assert {each["status"] for each in findings.values()} == {"ok"}
    assert findings["queue", "workers"]["message"] == "1 alive, 0 jobs wait"


def test_jobs_that_wait_for_nobody_are_a_failure(
    doctor: Doctor, on_queue: Callable[..., Any]
) -> None:
    code, findings = doctor("--only", "queue")
    assert (code, findings["queue", "workers"]["status"]) == (0, "warning")
    on_queue(lambda _, client: client.submit("x"))
    code, findings = doctor("--only", "queue")
    assert (code, findings["queue", "workers"]["status"]) == (1, "failure")
    assert "and 1 jobs wait" in findings["queue", "workers"]["message"]
    assert "inferq worker --queue" in findings["queue", "workers"]["advice"]


def test_partitions_without_a_worker_are_named(
    doctor: Doctor, on_queue: Callable[..., Any]
) -> None:
    on_queue(lambda scripts, _: scripts.register("w", REPORT))
    _, findings = doctor("--only", "queue", "--partitions", "3")
    assert "partitions 1, 2" in findings["queue", "workers"]["message"]


def test_dead_letters_stale_workers_and_mixed_models_are_found(
    doctor: Doctor, on_queue: Callable[..., Any]
) -> None:
    async def spoil(scripts: QueueScripts, client: AsyncClient) -> None:
        await scripts.register("new", {**REPORT, "version": "9.9.9"})
        await scripts.register("other", {**REPORT, "model": "another"})
        keys, old = scripts.keys, msgpack.packb({**REPORT, "t": 1})
        await client.run(lambda c: c.hset(keys.workers, "old", old), slot_key=keys.prefix)
        await client.run(lambda c: c.xadd(keys.dead, {"kind": "crashed"}), slot_key=keys.prefix)

    on_queue(spoil)
    code, findings = doctor("--only", "queue")
    assert code == 1
    assert findings["queue", "dead letters"]["status"] == "warning"
    assert "inferq dead redrive ID" in findings["queue", "dead letters"]["advice"]
    assert findings["queue", "stale workers"]["message"] == "1 ended without a word: old"
    assert "different models: another, m" in findings["queue", "models"]["message"]
    assert "9.9.9" in findings["queue", "versions"]["message"]


def test_a_job_that_has_waited_long_is_told(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def overview(_: object) -> QueueOverview:
        lanes = {lane: LaneOverview(1, 0, 120_000) for lane in Lane}
        return QueueOverview(0, lanes, Load(queued=3), 0, 0)

    monkeypatch.setattr("inferq.producer.QueueAdmin.overview", overview)
    _, findings = doctor("--only", "queue")
    assert findings["queue", "oldest job"]["status"] == "warning"
    assert findings["queue", "oldest job"]["message"] == "has waited 120 s"
