"""`inferq tasks` as processes: killed at the worst time, two at once, and with the least rights."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from inferq import Client, Lane, Webhook
from inferq.protocol.acl import Role, acl_rules
from inferq.protocol.keys import QueueKeys, TaskKeys

#: Generous: the machine may be busy.
TIMEOUT_S = 90


class Running:
    """A tasks process; `lines` are those of its log, so far."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, env=environment, stderr=file, start_new_session=True
            )

    @property
    def lines(self) -> list[dict[str, Any]]:
        whole = [line for line in self._log.read_text().splitlines(keepends=True) if "\n" in line]
        return [json.loads(line) for line in whole]

    def kill(self) -> None:
        """Kill it and its workers."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> int:
        """End it in order; return its exit code."""
        self.process.terminate()
        return self.process.wait(TIMEOUT_S)


@pytest.fixture
def start_tasks(
    valkey_url: str, queue: str, secret: str, tmp_path: Path
) -> Iterator[Callable[..., Running]]:
    """Starts tasks processes; what is left of them is killed."""
    started: list[Running] = []

    def start(*flags: str, url: str = valkey_url) -> Running:
        environment = {
            **os.environ,
            "INFERQ_REDIS_URL": url,
            "INFERQ_TASKS_QUEUES": queue,
            "INFERQ_TASKS_WORKERS": "1",
            "INFERQ_TASKS_POLL_INTERVAL_S": "0.1",
            "INFERQ_TASKS_WEBHOOK_SECRETS": f"default={secret}",
            "INFERQ_TASKS_WEBHOOK_ALLOWED_NETWORKS": "127.0.0.0/8",
            "INFERQ_TASKS_WEBHOOK_ALLOW_HTTP": "true",
            "INFERQ_LOG_FORMAT": "json",
            "INFERQ_LOG_LEVEL": "debug",
        }
        command = [sys.executable, "-P", "-m", "inferq", "tasks", *flags]
        running = Running(command, environment, tmp_path / f"tasks-{len(started)}.log")
        started.append(running)
        return running

    yield start
    for running in started:
        running.kill()


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def wait_until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_killed_in_a_delivery_and_before_it_each_end_is_delivered_by_one_id(
    start_tasks: Any, end_job: Any, receiver: Any, make_answer: Any, plain_redis: redis.Redis,
    queue: str,
) -> None:  # fmt: skip
    receiver.answers = [make_answer(wait_s=30), make_answer()]
    under_way = end_job()
    first = start_tasks()
    wait_until(lambda: receiver.got)
    first.kill()
    waiting = end_job()  # ends while nobody is there
    assert plain_redis.xlen(QueueKeys(queue).outbox) == 1
    # its lease ends, without the test waiting for it
    assert plain_redis.zadd(TaskKeys(queue).due, {f"msg_{under_way}": 1}, xx=True, ch=True) == 1
    second = start_tasks()
    wait_until(lambda: plain_redis.zcard(TaskKeys(queue).due) == 0 and len(receiver.got) == 3)
    assert second.end() == 0
    assert sorted(receiver.ids[1:]) == sorted({f"msg_{under_way}", f"msg_{waiting}"})
    assert receiver.ids[0] == f"msg_{under_way}"  # a receiver drops what it has: same id
    assert plain_redis.xlen(QueueKeys(queue).outbox) == 0


def test_two_at_once_do_each_interval_once(
    start_tasks: Any, sync_client: Client, plain_redis: redis.Redis, queue: str, valkey_url: str
) -> None:
    delayed = sync_client.submit("x", delay_s=0.1)
    both = [start_tasks("--sweep-interval-s", "3600", "--promote-interval-s", "2") for _ in "ab"]
    wait_until(lambda: all(any(line["event"] == "doing tasks" for line in r.lines) for r in both))
    wait_until(lambda: plain_redis.xlen(QueueKeys(queue).jobs(Lane.NORMAL)) == 1)
    assert delayed.status().state == "queued"
    wait_until(lambda: any(line["event"] == "swept" for r in both for line in r.lines))
    time.sleep(2)
    assert [r.end() for r in both] == [0, 0]
    assert sum(line["event"] == "swept" for r in both for line in r.lines) == 1


def test_a_worker_process_that_dies_is_replaced_and_health_and_metrics_are_told(
    start_tasks: Any, end_job: Any, receiver: Any, closed_port: int, metrics_text: Any
) -> None:
    running = start_tasks("--health-port", str(closed_port), "--health-host", "127.0.0.1")
    wait_until(lambda: any(line["event"] == "doing tasks" for line in running.lines))
    for path in ("livez", "readyz"):
        with urllib.request.urlopen(f"http://127.0.0.1:{closed_port}/{path}") as response:
            assert response.status == 200

    def told() -> tuple[float, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{closed_port}/metrics") as response:
            scrape = metrics_text.Scrape(response.read().decode())
        metrics_text.check_against_page(scrape)
        return (
            scrape.value("inferq_webhook_attempts_total", outcome="delivered"),
            scrape.value("inferq_tasks_worker_restarts_total"),
        )

    end_job()
    wait_until(lambda: told() == (1, 0))
    children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
    for pid in map(int, children.read_text().split()):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"spawn_main" in command:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: any(line["event"] == "worker process ended" for line in running.lines))
    end_job()
    wait_until(lambda: told() == (2, 1))  # what the dead one did is not forgotten
    assert len(receiver.got) == 2
    assert running.end() == 0


@pytest.mark.parametrize("own_server", ["valkey", "redis"], indirect=True)
def test_the_rights_of_its_role_are_enough_and_no_more_than_its_keys(
    start_tasks: Any, own_server: Any, queue: str, receiver: Any, make_client: Any, make_answer: Any
) -> None:
    with redis.Redis.from_url(own_server.url) as admin:
        rules = acl_rules(Role.TASKS, queue).split()
        admin.execute_command("ACL", "SETUSER", "tasks", "on", ">secret", *rules)  # type: ignore[no-untyped-call]
        receiver.answers = [make_answer(500), make_answer(410)]
        producer = make_client(own_server.url)
        producer.submit("x", webhook=Webhook(receiver.url)).cancel()
        producer.submit("x", delay_s=0.01)
        url = own_server.url.replace("redis://", "redis://tasks:secret@")
        running = start_tasks(
            *("--webhook-retry-delays-s", "0.1", "--sweep-interval-s", "1"), url=url
        )
        wait_until(lambda: admin.zcard(TaskKeys(queue).dead) == 1)
        wait_until(lambda: sum(line["event"] == "swept" for line in running.lines) > 1)
        # RQ's own cleaning up, and failing
        admin.hset(
            f"{TaskKeys.RQ_PREFIX}:job:bad",
            mapping={"data": '["os.system", null, ["true"], {}]', "origin": queue},
        )
        admin.rpush(f"{TaskKeys.RQ_PREFIX}:queue:{queue}", "bad")
        wait_until(lambda: any(line["event"] == "task refused" for line in running.lines))
        assert running.end() == 0
        denied = {e["object"] for e in admin.acl_log() if e["username"] == "tasks"}
        assert denied <= {"client|setinfo"}  # redis-py tells its name where it may
        problems = [line for line in running.lines if line["level"] in ("warning", "error")]
        assert {line["event"] for line in problems} == {"webhook", "task refused"}
        ours = (b"inferq:{tasks}:", f"inferq:{{{queue}.".encode())
        assert [key for key in admin.keys("*") if not key.startswith(ours)] == []


def test_a_server_that_is_not_there_ends_it_at_the_start(
    start_tasks: Any, closed_port: int
) -> None:
    running = start_tasks(url=f"redis://127.0.0.1:{closed_port}/0")
    assert running.process.wait(TIMEOUT_S) == 3
