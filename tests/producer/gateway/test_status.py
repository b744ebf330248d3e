"""The status page's data: queues now and before, their workers, blocks, and who may see them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from inferq import Client, SamplingParams
from inferq.embedded import EmbeddedServer
from inferq.producer.gateway.status.history import History
from inferq.producer.workers import WorkerInfo
from inferq.protocol.keys import Lane, QueueKeys
from inferq.protocol.replies import LaneOverview, Load, QueueOverview
from inferq.protocol.snapshots import BlockSnapshot, HoldingSequence

TIMEOUT_S = 60.0
#: What PTTL says of a key that was there, on a very slow machine; -1 would be one that stays.
EXPIRED = {-2}


def eventually(look: Callable[[], Any]) -> Any:
    """Look until there is something to see; return that."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := look()):
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.05)
    return found


def queues_of(gateway: Any, **options: Any) -> list[dict[str, Any]]:
    answer = httpx.get(f"{gateway.url}/status/queues", timeout=TIMEOUT_S, **options)
    assert answer.status_code == 200, answer.text
    queues: list[dict[str, Any]] = answer.json()["queues"]
    return queues


def blocks_of(gateway: Any, **asked: Any) -> Any:
    answer = httpx.get(f"{gateway.url}/status/blocks", params=asked, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["snapshot"]


def write_keys(folder: Path, **models: list[str] | None) -> Path:
    rows = []
    for name, allowed in models.items():
        row: dict[str, Any] = {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()}
        rows.append(row if allowed is None else row | {"models": allowed})
    path = folder / "keys.json"
    path.write_text(json.dumps(rows))
    return path


def test_a_queue_shows_what_waits_and_a_worker_what_it_does(
    gateway: Any, stand_in_worker: Any, queue: str
) -> None:
    stand_in_worker.slow_down(0.02)
    with Client(stand_in_worker.url, queue=queue) as client:
        client.submit("x", SamplingParams(max_tokens=4000))
        client.submit("x", delay_s=600)
        [shown] = eventually(
            lambda: [
                each
                for each in queues_of(gateway)
                if (each["now"] or {}).get("running") and each["workers"][0]["generated_tokens"]
            ]
        )
    assert (shown["queue"], shown["is_reached"]) == (queue, True)
    now = shown["now"]
    assert (now["queued"], now["running"], now["delayed"]) == (0, 1, 1)
    assert now["lanes"]["normal"] == {"waiting": 0, "taken": 1, "oldest_s": None}
    assert now["budget_tokens_outstanding"] == 4000 + 16
    assert now["dead_letters"] == 0
    [worker] = shown["workers"]
    assert (worker["name"], worker["model"]) == ("stand-in-worker", "stand-in")
    assert (worker["state"], worker["blocks"]) == ("serving", 100_000)
    history = shown["history"]
    assert {len(column) for column in history.values()} == {len(history["time"])}
    assert history["taken"][-1] == 1


def test_tokens_per_second_are_those_between_two_reports(
    gateway: Any, stand_in_worker: Any, queue: str
) -> None:
    stand_in_worker.slow_down(0.01)
    with Client(stand_in_worker.url, queue=queue) as client:
        client.submit("x", SamplingParams(max_tokens=4000))
        [shown] = eventually(
            lambda: [each for each in queues_of(gateway) if each["history"]["generated"][-1:] > [0]]
        )
    assert 0 < shown["history"]["generated"][-1] <= 150  # a step takes 10 ms at least


def test_blocks_come_once_somebody_asks(gateway: Any, stand_in_worker: Any, queue: str) -> None:
    sequence = HoldingSequence("a1b2c3", 1, 40)
    runs = [3, 2, 1, 0, 99_997, 0, 0, 0, 2, 4, 1, 0]
    stand_in_worker.engine.snapshot = BlockSnapshot(100_000, 2, runs, [sequence])
    keys = QueueKeys(queue)
    with redis.Redis.from_url(stand_in_worker.url) as server:
        assert not server.exists(keys.watch, keys.blocks("stand-in-worker"))
        asked = {"queue": queue, "worker": "stand-in-worker"}
        shown = eventually(lambda: blocks_of(gateway, **asked))
        assert server.pttl(keys.watch) in EXPIRED | set(range(10_001))
        assert server.pttl(keys.blocks("stand-in-worker")) in EXPIRED | set(range(5_001))
    counts = {"free": 99_997, "cached": 0, "used": 3, "shared": 0, "swapped": 2}
    assert shown["counts"] == counts
    assert (shown["blocks"], shown["host_blocks"], shown["runs"]) == (100_000, 2, runs)
    assert shown["states"] == list(counts)
    assert shown["sequences"] == [{"job": "a1b2c3", "index": 1, "tokens": 40}]


def test_a_snapshot_that_cannot_be_read_is_none(
    gateway: Any, stand_in_worker: Any, queue: str
) -> None:
    keys = QueueKeys(queue)
    with redis.Redis.from_url(stand_in_worker.url) as server:
        server.set(keys.blocks("stand-in-worker"), b"no snapshot", px=60_000)
    assert blocks_of(gateway, queue=queue, worker="stand-in-worker") is None


def test_who_is_not_there_is_not_found(http: httpx.Client, queue: str) -> None:
    for asked in (
        {"queue": queue, "worker": "nobody"},
        {"queue": "other", "worker": "stand-in-worker"},
        {"queue": queue, "worker": "stand-in-worker", "partition": "7"},
    ):
        answer = http.get("/status/blocks", params=asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "worker_not_found")
    answer = http.get("/status/blocks", params={"queue": queue})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "worker")


def test_a_worker_that_dies_is_late_and_its_rate_does_not_count(
    gateway: Any, stand_in_worker: Any, queue: str
) -> None:
    stand_in_worker.slow_down(0.01)
    with Client(stand_in_worker.url, queue=queue) as client:
        client.submit("x", SamplingParams(max_tokens=4000))
        eventually(lambda: queues_of(gateway)[0]["workers"][0]["generated_rate"])
    stand_in_worker.die()
    [worker] = eventually(
        lambda: [w for w in queues_of(gateway)[0]["workers"] if w["state"] in ("late", "gone")]
    )
    assert worker["generated_rate"] == 0
    eventually(lambda: queues_of(gateway)[0]["history"]["generated"][-1] == 0)


def test_a_worker_that_drains_says_so_at_once(
    start_stand_in: Callable[..., Any], start_gateway: Callable[..., Any], queue: str
) -> None:
    worker = start_stand_in(drain_timeout_s=60.0)
    worker.slow_down(0.02)
    gateway = start_gateway()
    with Client(worker.url, queue=queue) as client:
        job = client.submit("x", SamplingParams(max_tokens=4000))
        next(iter(job.stream(timeout_s=TIMEOUT_S)))  # what has not begun is handed back
        worker.ask_to_drain()
        eventually(lambda: queues_of(gateway)[0]["workers"][0]["state"] == "draining")
        job.cancel()


def test_several_queues_show_in_their_order_also_without_workers(
    start_stand_in: Callable[..., Any], start_gateway: Callable[..., Any], queue: str
) -> None:
    start_stand_in(queue=f"{queue}-b")
    gateway = start_gateway(queues=(f"{queue}-a", f"{queue}-b"))
    first, second = eventually(
        lambda: [q for q in queues_of(gateway) if q["now"]][:2] if all_seen(gateway) else []
    )
    assert (first["queue"], first["workers"]) == (f"{queue}-a", [])
    assert (second["queue"], len(second["workers"])) == (f"{queue}-b", 1)


def all_seen(gateway: Any) -> bool:
    return all(each["now"] for each in queues_of(gateway))


def test_data_needs_a_key_and_shows_the_models_that_it_may_use(
    start_stand_in: Callable[..., Any],
    start_gateway: Callable[..., Any],
    queue: str,
    tmp_path: Path,
) -> None:
    start_stand_in(queue=f"{queue}-a", model="one")
    start_stand_in(queue=f"{queue}-b", model="two", name="other-worker", adapters={"two-fr": "/x"})
    keys = write_keys(tmp_path, all=None, some=["two-fr"], none=["three"])
    gateway = start_gateway(queues=(f"{queue}-a", f"{queue}-b"), api_keys_file=keys)

    def seen(key: str) -> list[str]:
        return [q["queue"] for q in queues_of(gateway, headers={"Authorization": f"Bearer {key}"})]

    assert seen("all") == [f"{queue}-a", f"{queue}-b"]
    assert seen("some") == [f"{queue}-b"]
    assert seen("none") == []
    for path in ("/status/queues", f"/status/blocks?queue={queue}-b&worker=other-worker"):
        assert httpx.get(f"{gateway.url}{path}").status_code == 401
    asked = {"queue": f"{queue}-a", "worker": "stand-in-worker"}
    for key, status in (("some", 404), ("all", 200)):
        answer = httpx.get(
            f"{gateway.url}/status/blocks",
            params=asked,
            headers={"Authorization": f"Bearer {key}"},
        )
        assert answer.status_code == status


@pytest.mark.slow
def test_a_server_out_of_reach_is_said(start_gateway: Callable[..., Any], queue: str) -> None:
    with EmbeddedServer() as server:
        gateway = start_gateway(redis_url=server.url)
        eventually(lambda: queues_of(gateway)[0]["is_reached"])
    [shown] = eventually(lambda: [q for q in queues_of(gateway) if not q["is_reached"]])
    assert (shown["queue"], shown["now"]) == (queue, None)
    assert shown["history"]["time"]  # what was is still known


def overview(time_ms: int) -> QueueOverview:
    lanes = {lane: LaneOverview(i, 1, None) for i, lane in enumerate(Lane, 1)}
    return QueueOverview(time_ms, lanes, Load(0, 0, 0, 0, 0), 0, 0)


def test_the_history_forgets_what_is_older_than_ten_minutes() -> None:
    history = History()
    for time_ms in range(0, 700_000, 2_000):
        history.add(overview(time_ms), prompt_rate=1.0, generated_rate=2.0)
    columns = history.columns()
    assert (columns["time"][0], columns["time"][-1]) == (98.0, 698.0)
    assert [columns[lane.value][0] for lane in Lane] == [1, 2, 3]
    assert (columns["taken"][0], columns["prompt"][0], columns["generated"][0]) == (3, 1.0, 2.0)


def test_a_clock_that_is_set_back_leaves_a_history_in_order() -> None:
    history = History()
    for time_ms in (5_000, 7_000, 9_000, 6_000, 8_000):
        history.add(overview(time_ms), prompt_rate=0.0, generated_rate=0.0)
    assert history.columns()["time"] == [5.0, 6.0, 8.0]


@pytest.mark.parametrize(
    ("report", "age_ms", "state"),
    [
        ({"every": 5_000}, 14_000, "serving"),
        ({"every": 5_000, "draining": True}, 14_000, "draining"),
        ({"every": 5_000, "draining": True}, 16_000, "late"),
        ({"every": 100}, 1_900, "serving"),
        ({"every": 100}, 2_100, "late"),
        ({"every": 60_000}, 31_000, "gone"),
        ({}, 29_000, "serving"),  # an older worker, which does not tell
    ],
)
def test_a_workers_state_follows_from_its_last_report(
    report: dict[str, Any], age_ms: int, state: str
) -> None:
    assert WorkerInfo.from_report("w", 0, {"t": 0, **report}, age_ms).state == state


@pytest.mark.parametrize("rates", [None, 7, [1], [1, 2, 3], ["a", "b"], [float("nan"), -1.0]])
def test_rates_that_are_none_count_as_0(rates: Any) -> None:
    info = WorkerInfo.from_report("w", 0, {"rates": rates}, 0)
    assert (info.prompt_rate, info.generated_rate) == (0.0, 0.0)
