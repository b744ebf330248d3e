"""The bundled server's own files, run by a real Valkey: its users can do their work and no more."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import redis

from inferq import Client
from inferq.embedded import bundled_binary
from inferq.protocol.acl import Role, acl_rules
from inferq.protocol.keys import GatewayKeys, Lane, QueueKeys

PASSWORDS = {role: f"{role}pass" for role in ("worker", "gateway", "tasks", "keda", "admin")}
#: What KEDA sends for a trigger of the type `redis`, which counts by the key's type.
COUNT = """
local kind = redis.call('type', KEYS[1]).ok
return redis.call(({zset = 'zcard', none = 'llen', list = 'llen'})[kind], KEYS[1])
"""


@dataclass(frozen=True)
class Started:
    """A process, what it logs, and the ports of its probes and of its metrics."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int
    metrics_port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def metrics(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}"


@pytest.fixture(scope="module")
def files(helm_of) -> dict[str, str]:
    configmap = helm_of("4").scenario("webhooks").named("ConfigMap", "-valkey")
    data: dict[str, str] = configmap["data"]
    return data


@pytest.fixture(scope="module")
def users(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `start.sh` writes before it becomes the server."""
    folder = tmp_path_factory.mktemp("run")
    script = files["start.sh"].replace("/run/valkey", str(folder))
    script = script.replace("exec valkey-server", "echo valkey-server")
    environment = {f"{role.upper()}_PASSWORD": text for role, text in PASSWORDS.items()}
    done = subprocess.run(
        ["sh", "-c", script], env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "valkey-server /etc/valkey/valkey.conf\n"
    return folder / "users.acl"


@pytest.fixture(scope="module")
def url_of(files, users: Path, tmp_path_factory) -> Iterator[Callable[[str], str]]:
    """The URL of a role, at a server that runs the rendered file; where it lies differs."""
    data, port = tmp_path_factory.mktemp("data"), free_port()
    configuration = files["valkey.conf"]
    for rendered, here in (
        ("port 6379", f"port {port}\nbind 127.0.0.1"),
        ("dir /data", f"dir {data}"),
        ("aclfile /run/valkey/users.acl", f"aclfile {users}"),
    ):
        assert rendered in configuration
        configuration = configuration.replace(rendered, here)
    (data / "valkey.conf").write_text(configuration)
    command = [str(bundled_binary()), str(data / "valkey.conf")]
    with (data / "log").open("wb") as log, subprocess.Popen(command, stdout=log) as server:
        try:
            wait_for_server(f"redis://probe:probe@127.0.0.1:{port}/0", server, data / "log")
            yield lambda role: f"redis://{role}:{PASSWORDS[role]}@127.0.0.1:{port}/0"
        finally:
            server.terminate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_server(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    with redis.Redis.from_url(url) as client:
        while True:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                client.ping()
            except redis.exceptions.ConnectionError:
                time.sleep(0.02)
            else:
                return


def test_the_rules_are_the_protocols(users: Path) -> None:
    rules = {line.split()[1]: line.split(" ", 4)[4] for line in users.read_text().splitlines()[3:]}
    for role in (Role.WORKER, Role.GATEWAY, Role.TASKS):
        assert rules[role.value] == acl_rules(role, "chat", "small")


def test_the_settings_are_those_that_the_protocol_asks_for(files: dict[str, str]) -> None:
    lines = files["valkey.conf"].splitlines()
    for line in (
        "appendonly yes",
        "maxmemory-policy noeviction",
        "stream-node-max-bytes 1024",
        "aclfile /run/valkey/users.acl",
    ):
        assert line in lines


def test_nobody_comes_in_without_a_password(users: Path) -> None:
    assert users.read_text().splitlines()[0] == "user default off"
    assert users.stat().st_mode & 0o077 == 0


def test_a_gateway_submits_and_a_scaler_counts_what_it_submitted(url_of) -> None:
    keys = QueueKeys("chat")
    with Client(url_of("gateway"), queue="chat") as client:
        client.submit([1, 2, 3])
        client.submit([1, 2, 3], lane="high")
        client.submit([1, 2, 3], delay_s=3600)
    with redis.Redis.from_url(url_of("keda")) as scaler:
        assert [scaler.xlen(keys.jobs(lane)) for lane in Lane] == [1, 1, 0]
        assert scaler.eval(COUNT, 1, keys.delayed) == 1
        assert scaler.eval(COUNT, 1, QueueKeys("small").delayed) == 0


def test_a_scaler_can_do_nothing_else(url_of) -> None:
    keys = QueueKeys("chat")
    with redis.Redis.from_url(url_of("keda")) as scaler:
        for attempt in (
            lambda: scaler.xrange(keys.jobs(Lane.NORMAL)),
            lambda: scaler.xadd(keys.jobs(Lane.NORMAL), {"a": "b"}),
            lambda: scaler.delete(keys.delayed),
            lambda: scaler.hgetall(keys.load),
            lambda: scaler.xlen("another:key"),
            lambda: scaler.keys("*"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                attempt()


@pytest.fixture(scope="module")
def running(helm_of, url_of, tmp_path_factory) -> Iterator[Any]:
    """A gateway and tasks, with the arguments that the chart gives them."""
    rendering, folder = helm_of("4").scenario("webhooks"), tmp_path_factory.mktemp("running")
    with (
        gateway_of(rendering, url_of, folder) as gateway,
        tasks_of(rendering, url_of, folder) as tasks,
    ):
        yield SimpleNamespace(gateway=gateway, tasks=tasks)


def test_tasks_start_as_the_chart_starts_them_and_wake_a_pool(running, url_of) -> None:
    with Client(url_of("gateway"), queue="small") as client:
        client.submit([1, 2, 3], delay_s=0.2)
    with redis.Redis.from_url(url_of("keda")) as scaler:
        lane = QueueKeys("small").jobs(Lane.NORMAL)
        wait_for(lambda: scaler.xlen(lane) == 1, running.tasks)
    metrics = httpx.get(f"{running.tasks.metrics}/metrics", timeout=30).text
    assert 'inferq_queue_up{queue="small"} 1' in metrics


def test_a_gateway_starts_as_the_chart_starts_it_with_metrics_apart(running) -> None:
    address = running.gateway.address
    models = httpx.get(f"{address}/v1/models", timeout=30).json()["data"]
    assert {model["id"] for model in models} == {"Qwen3-8B", "Qwen3-0.6B"}
    metrics = httpx.get(f"{running.gateway.metrics}/metrics", timeout=30).text
    assert 'inferq_queue_up{queue="chat"} 1' in metrics
    assert httpx.get(f"{address}/metrics", timeout=30).status_code == 404


def test_a_batch_goes_from_the_gateway_through_tasks_to_its_end(running) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
    body = {"model": "Qwen3-8B", "prompt": "Hi", "max_tokens": -1}
    text = json.dumps(line | {"body": body}).encode()
    with httpx.Client(base_url=running.gateway.address, timeout=30) as client:
        file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": text}).json()
        asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json={"input_file_id": file["id"], **asked}).json()

        def ended() -> bool:
            batch.update(client.get(f"/v1/batches/{batch['id']}").json())
            return batch["status"] in ("completed", "failed")

        wait_for(ended, running.tasks)
        assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
        answer = client.get(f"/v1/files/{batch['error_file_id']}/content").json()
        assert answer["custom_id"] == "1"


@contextlib.contextmanager
def tasks_of(rendering: Any, url_of: Any, folder: Path) -> Iterator[Started]:
    """Tasks as the chart starts them."""
    [pod] = [pod for pod in rendering.pods if pod.component == "tasks"]
    secrets, port = folder / "secrets.json", free_port()
    secrets.write_text(json.dumps({"default": "whsec_" + base64.b64encode(b"s" * 32).decode()}))
    mounted = "--webhook-secrets-file=/etc/inferq/webhooks/secrets.json"
    here = {
        mounted: f"--webhook-secrets-file={secrets}",
        "--batch-storage=/var/lib/inferq/batches": f"--batch-storage={folder / 'batches'}",
        "--health-port=8081": f"--health-port={port}",
        "--workers=4": "--workers=1",
    }
    more = "--promote-interval-s=0.5"
    log = folder / "tasks.log"
    with started(pod.main["args"], here, url_of("tasks"), log, more) as process:
        tasks = Started(process, log, port, port)
        answers_its_probes(pod, tasks)
        yield tasks


@contextlib.contextmanager
def gateway_of(rendering: Any, url_of: Any, folder: Path) -> Iterator[Started]:
    """A gateway as the chart starts it."""
    [pod] = [pod for pod in rendering.pods if pod.component == "gateway"]
    port, metrics_port = free_port(), free_port()
    here = {
        "--batch-storage=/var/lib/inferq/batches": f"--batch-storage={folder / 'batches'}",
        "--port=8000": f"--port={port}",
        "--metrics-port=8001": f"--metrics-port={metrics_port}",
        "--shutdown-delay-s=5": "--shutdown-delay-s=0",
    }
    log = folder / "gateway.log"
    with started(pod.main["args"], here, url_of("gateway"), log) as process:
        gateway = Started(process, log, port, metrics_port)
        answers_its_probes(pod, gateway)
        yield gateway


@contextlib.contextmanager
def started(
    arguments: list[str], here: dict[str, str], url: str, log: Path, *more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a container's arguments, some of them changed for this machine."""
    assert set(here) <= set(arguments)
    given = [here.get(argument, argument) for argument in arguments]
    command = [sys.executable, "-P", "-m", "inferq", *given, *more]
    environment = {"PATH": "/usr/bin:/bin", "INFERQ_REDIS_URL": url}
    with (
        log.open("wb") as written,
        subprocess.Popen(command, env=environment, stderr=written, stdout=written) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
        assert process.wait(60) == 0, log.read_text()
    assert "NOPERM" not in log.read_text()


def answers_its_probes(pod: Any, running: Started) -> None:
    ready, live = (
        running.address + pod.main[probe]["httpGet"]["path"]
        for probe in ("readinessProbe", "livenessProbe")
    )
    wait_for(lambda: status_of(ready) == 200, running)
    assert status_of(live) == 200


def wait_for(condition: Callable[[], bool], running: Started) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert running.process.poll() is None, running.log.read_text()
        assert time.monotonic() < deadline, running.log.read_text()
        time.sleep(0.1)


def status_of(address: str) -> int:
    try:
        return httpx.get(address, timeout=5).status_code
    except httpx.ConnectError:
        return 0


def test_no_user_reaches_another_queue(url_of) -> None:
    with redis.Redis.from_url(url_of("gateway")) as client:
        client.zadd(GatewayKeys("team").slots, {"a": 1})
    for role in ("worker", "gateway", "tasks"):
        with redis.Redis.from_url(url_of(role)) as client:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.hgetall(QueueKeys("other").load)
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.flushall()


def test_a_probe_needs_no_password_and_may_only_ping(url_of) -> None:
    url = url_of("keda").replace("keda:kedapass", "probe:probe")
    with redis.Redis.from_url(url) as probe:
        assert probe.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            probe.info()
