"""What KEDA would do with the rendered triggers on a real server, from an empty queue to an outage.

KEDA itself is not run. `Autoscaler` does what its documentation and code (2.17 to 2.20) say of the
triggers `redis-streams` without a group (XLEN) and `redis` (the length by the key's type), of
`scalingModifiers` and `fallback`, and of a HorizontalPodAutoscaler with a target per pod.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
from typing import Any

import pytest
import redis.asyncio
from driven_queue import DrivenQueue

from inferq.embedded import EmbeddedServer
from inferq.protocol.keys import Lane, QueueKeys

#: Metadata that the triggers know; KEDA's schema would let a misspelt one pass.
CONNECTION = {
    *("address", "addresses", "databaseIndex", "username", "enableTLS", "sentinelMaster"),
}
KNOWN = {
    "streams": {"stream", "streamLength", "activationLagCount"} | CONNECTION,
    "list": {"listName", "listLength", "activationListLength"} | CONNECTION,
}
#: What a TriggerAuthentication may give them.
PARAMETERS = {"password", "sentinelPassword", "ca"}


class Autoscaler:
    """The number of workers that KEDA would want, poll by poll."""

    def __init__(self, scaled_object: dict[str, Any], client: redis.asyncio.Redis) -> None:
        self._spec = scaled_object["spec"]
        self._client = client
        self.replicas = 0
        self._idle_since = 0.0
        self._failures = 0

    async def poll(self, at: float) -> int:
        """Look at the server at a time in seconds and return the workers wanted from then on."""
        spec = self._spec
        low, high = spec["minReplicaCount"], spec["maxReplicaCount"]
        modifiers = spec["advanced"]["scalingModifiers"]
        try:
            counts = {t["name"]: await self._count(t) for t in spec["triggers"]}
        except redis.exceptions.RedisError:
            self._failures += 1
            if self._failures >= spec["fallback"]["failureThreshold"]:
                self.replicas = spec["fallback"]["replicas"]
            return self.replicas
        self._failures = 0
        value = evaluate(modifiers["formula"], counts)
        if value > float(modifiers["activationTarget"]):
            self._idle_since = at
            wanted = math.ceil(value / float(modifiers["target"]))
            self.replicas = min(high, max(1, low, wanted))
        elif low == 0 and at - self._idle_since >= spec["cooldownPeriod"]:
            self.replicas = 0
        else:
            self.replicas = max(low, min(self.replicas, 1))
        return self.replicas

    async def _count(self, trigger: dict[str, Any]) -> int:
        metadata = trigger["metadata"]
        if trigger["type"] == "redis-streams":
            return int(await self._client.xlen(metadata["stream"]))
        assert trigger["type"] == "redis"
        kind = await self._client.type(metadata["listName"])
        count = {b"zset": self._client.zcard, b"none": self._client.llen}[kind]
        return int(await count(metadata["listName"]))


def evaluate(formula: str, counts: dict[str, int]) -> float:
    """The value of a sum whose parts may be `(condition ? one : other)`."""
    python = re.sub(r"\((.+?) \? (.+?) : (.+?)\)", r"(\2 if \1 else \3)", formula)
    return float(eval(python, {"__builtins__": {}}, dict(counts)))  # the chart's own text


@pytest.fixture
def q(redis_client: redis.asyncio.Redis, queue: str) -> Any:
    """The queue that the autoscaler looks at, driven by the protocol's scripts."""
    return DrivenQueue(redis_client, queue)


def scaled_object_of(helm4: Any, queue: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The rendered object of four jobs to a worker, from 0 to 5 workers."""
    pool = {
        "model": "some/model",
        "autoscaling": {
            "type": "keda",
            "minReplicas": 0,
            "maxReplicas": 5,
            "keda": {"jobsPerReplica": 4, "cooldownPeriod": 300},
        },
    }
    rendering = helm4.values({f"pools.{queue}": pool, **changes})
    scaled_object: dict[str, Any]
    [scaled_object] = rendering.of_kind("ScaledObject")
    return scaled_object


@pytest.fixture
def scaler(helm4: Any, q: Any, queue: str) -> Autoscaler:
    """An autoscaler of that object."""
    return Autoscaler(scaled_object_of(helm4, queue, {}), q.redis)


def test_the_keys_are_the_protocols(rendering) -> None:
    for scaled_object in rendering.of_kind("ScaledObject"):
        name = scaled_object["spec"]["scaleTargetRef"]["name"]
        args = dict(
            argument[2:].split("=", 1)
            for argument in rendering.named("Deployment", name)["spec"]["template"]["spec"][
                "containers"
            ][0]["args"]
            if "=" in argument
        )
        keys = QueueKeys(args["queue"], int(args["partition"]))
        triggers = {t["name"]: t["metadata"] for t in scaled_object["spec"]["triggers"]}
        for lane in Lane:
            assert triggers.pop(lane.value)["stream"] == keys.jobs(lane)
        has_tasks = any(pod.component == "tasks" for pod in rendering.pods)
        delayed = [] if has_tasks else [keys.delayed]
        assert [t["listName"] for t in triggers.values()] == delayed


def test_triggers_have_only_metadata_that_they_know_as_text(rendering) -> None:
    for scaled_object in rendering.of_kind("ScaledObject"):
        spec = scaled_object["spec"]
        names = [trigger["name"] for trigger in spec["triggers"]]
        assert len(names) == len(set(names))
        formula = spec["advanced"]["scalingModifiers"]["formula"]
        assert set(re.findall(r"[a-z]+", formula)) == set(names)
        for trigger in spec["triggers"]:
            known = KNOWN["streams" if trigger["type"].endswith("-streams") else "list"]
            assert set(trigger["metadata"]) <= known
            assert all(isinstance(value, str) for value in trigger["metadata"].values())
            # with a group it would count what waits or what runs, never both
            assert "consumerGroup" not in trigger["metadata"]
        assert all(
            isinstance(value, str) for value in spec["advanced"]["scalingModifiers"].values()
        )
    for authentication in rendering.of_kind("TriggerAuthentication"):
        given = [target["parameter"] for target in authentication["spec"]["secretTargetRef"]]
        assert set(given) <= PARAMETERS


@pytest.mark.parametrize(
    ("scenario", "types", "connection"),
    [
        (
            "scale-to-zero",
            {"redis-streams", "redis"},
            {"address": "release-inferq-valkey.llm.svc:6379", "databaseIndex": "0"},
        ),
        (
            "tls-acl",
            {"redis-streams", "redis"},
            {
                "address": "redis.data.svc.cluster.local:6380",
                "databaseIndex": "2",
                "enableTLS": "true",
            },
        ),
        (
            "cluster-partitions",
            {"redis-cluster-streams", "redis-cluster"},
            {"addresses": "redis-0.redis.data:6379,redis-1.redis.data:6379"},
        ),
        (
            "sentinel",
            {"redis-sentinel-streams", "redis-sentinel"},
            {
                "addresses": "sentinel-0.redis.data:26379,sentinel-1.redis.data:26379",
                "databaseIndex": "0",
                "sentinelMaster": "inferq",
            },
        ),
    ],
)
def test_triggers_reach_the_workers_server(helm4, scenario: str, types, connection) -> None:
    scaled = helm4.scenario(scenario).of_kind("ScaledObject")
    assert scaled
    for scaled_object in scaled:
        triggers = scaled_object["spec"]["triggers"]
        assert {trigger["type"] for trigger in triggers} == types
        for trigger in triggers:
            given = {n: v for n, v in trigger["metadata"].items() if n in CONNECTION}
            assert given == {**connection, "username": "keda"}


async def test_an_empty_queue_has_no_worker_and_one_job_starts_one(scaler, q) -> None:
    assert await scaler.poll(0) == 0
    await q.enqueue(lane=Lane.LOW)
    assert await scaler.poll(15) == 1


async def test_a_backlog_is_summed_over_the_lanes_and_bounded(scaler, q) -> None:
    for lane in Lane:
        for _ in range(3):
            await q.enqueue(lane=lane)
    assert await scaler.poll(0) == 3  # nine jobs, four to a worker
    for _ in range(100):
        await q.enqueue()
    assert await scaler.poll(15) == 5


async def test_a_running_job_holds_its_worker_for_as_long_as_it_takes(scaler, q) -> None:
    await q.enqueue()
    [job] = (await q.claim()).claimed
    for at in range(0, 3600, 15):
        assert await scaler.poll(at) == 1
    await q.end("a", job)
    last_seen = 3585
    assert await scaler.poll(last_seen + 299) == 1
    assert await scaler.poll(last_seen + 300) == 0


async def test_a_drained_queue_leaves_nothing_behind_however_many_jobs_it_had(scaler, q) -> None:
    for _ in range(10):
        for _ in range(20):
            await q.enqueue()
        for job in (await q.claim()).claimed:
            await q.end("a", job)
    await q.assert_nothing_is_left()
    assert await scaler.poll(0) == 0
    assert await scaler.poll(300) == 0


async def test_a_job_cancelled_in_the_queue_is_put_away_by_one_worker(scaler, q) -> None:
    job_id = await q.enqueue()
    await q.cancel(job_id)
    assert await scaler.poll(0) == 1
    assert (await q.claim()).claimed == ()
    assert await scaler.poll(300) == 0


async def test_the_jobs_of_a_dead_worker_bring_another(scaler, q) -> None:
    job_id = await q.enqueue()
    await q.claim("a")
    scaler.replicas = 0  # the node is gone
    assert await scaler.poll(0) == 1
    await q.end_lease(job_id)
    [job] = (await q.claim("b")).claimed
    assert job.job_id == job_id
    await q.end("b", job)
    assert await scaler.poll(300) == 0


async def test_a_dead_letter_holds_no_worker(scaler, q) -> None:
    job_id = await q.enqueue()
    for worker in ("a", "b", "c", "d"):
        await q.claim(worker, idle=True)
        if await q.redis.zscore(q.keys.leases, job_id) is not None:
            await q.end_lease(job_id)
    assert await q.redis.xlen(q.keys.dead) == 1
    assert await scaler.poll(0) == 0
    assert await scaler.poll(300) == 0


async def test_an_entry_that_nobody_can_read_is_put_away_by_one_worker(scaler, q) -> None:
    await q.redis.xadd(q.keys.jobs(Lane.NORMAL), {"what": "is this"})
    assert await scaler.poll(0) == 1
    await q.claim("a")
    assert await scaler.poll(300) == 0


async def test_a_day_begins_and_ends_without_a_worker_and_leaves_no_key(scaler, q) -> None:
    assert await scaler.poll(0) == 0
    for _ in range(9):
        await q.enqueue()
    assert await scaler.poll(15) == 3
    running = list((await q.claim("a", max_jobs=4)).claimed)
    assert await scaler.poll(30) == 3  # nobody waits less because he is served
    lost = (await q.claim("b", max_jobs=2)).claimed
    for job in running:
        await q.end("a", job)
    assert await scaler.poll(45) == 2  # three wait, and a worker died with two
    for job in lost:
        await q.end_lease(job.job_id)
    while running := (await q.claim("a", idle=True)).claimed:
        assert await scaler.poll(3600) >= 1
        for job in running:
            await q.end("a", job)
    await q.assert_nothing_is_left()
    assert await scaler.poll(3899) == 1
    assert await scaler.poll(3900) == 0
    await q.enqueue(lane=Lane.HIGH)
    assert await scaler.poll(80_000) == 1


async def test_delayed_jobs_hold_one_worker_which_lets_them_in(scaler, q) -> None:
    ids = [await q.enqueue(delay_ms=3_600_000) for _ in range(50)]
    assert await scaler.poll(0) == 1
    assert await scaler.poll(3000) == 1
    for job_id in ids:
        await q.pass_delay(job_id)
    await q.claim("a", max_jobs=1)
    assert await scaler.poll(3600) == 5


async def test_with_tasks_delayed_jobs_bring_a_worker_when_they_are_due(
    helm4: Any, q: Any, queue: str, server: EmbeddedServer
) -> None:
    scaler = Autoscaler(scaled_object_of(helm4, queue, {"tasks.enabled": True}), q.redis)
    job_id = await q.enqueue(delay_ms=3_600_000)
    assert await scaler.poll(0) == 0
    await q.pass_delay(job_id)
    command = [sys.executable, "-m", "inferq", "tasks", "--burst", f"--queues={queue}"]
    environment = {**os.environ, "INFERQ_REDIS_URL": server.url}
    burst = await asyncio.create_subprocess_exec(*command, env=environment)
    assert await asyncio.wait_for(burst.wait(), 120) == 0
    assert await scaler.poll(15) == 1


@pytest.mark.parametrize(
    ("count_delayed", "tasks", "counted"),
    [
        ("auto", False, True),
        ("auto", True, False),
        (True, True, True),
        (False, False, False),
    ],
)
def test_delayed_jobs_are_counted_where_only_workers_let_them_in(
    helm4: Any, count_delayed: Any, tasks: bool, counted: bool
) -> None:
    changes = {
        "worker.autoscaling.keda.countDelayed": count_delayed,
        "tasks.enabled": tasks,
    }
    spec = scaled_object_of(helm4, "chat", changes)["spec"]
    assert ("delayed" in spec["advanced"]["scalingModifiers"]["formula"]) == counted
    assert ("delayed" in [trigger["name"] for trigger in spec["triggers"]]) == counted


async def test_an_outage_of_the_server_keeps_a_worker_and_passes(scaler, q, monkeypatch) -> None:
    await q.enqueue()
    assert await scaler.poll(0) == 1

    async def refuse(*_: Any) -> int:
        raise redis.exceptions.ConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(q.redis, "xlen", refuse)
        assert [await scaler.poll(at) for at in (15, 30, 45, 60)] == [1, 1, 1, 1]
    assert await scaler.poll(75) == 1
