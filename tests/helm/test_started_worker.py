"""A worker started with the very arguments and variables that the chart gives its container."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from inferq import healthcheck

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rendering_of(helm: Any, url: str, queue: str, model: Path, port: int) -> Any:
    pool = {
        "model": str(model),
        "servedModelName": "smollm2",
        "queue": queue,
        "gpu": {"enabled": False},
        "healthPort": port,
        "drainTimeoutSeconds": 5,
        "settings": {"max_model_len": 512, "num_kv_blocks": 128, "enable_prefix_caching": False},
    }
    return helm.values(
        {
            "pools.cpu": pool,
            "valkey.enabled": False,
            "redis.addresses": [urlsplit(url).netloc],
            "gateway.enabled": False,
            "helmTest.timeoutSeconds": 60,
        }
    )


def environment_of(container: dict[str, Any], tmp_path: Path) -> dict[str, str]:
    """Its variables, with folders of ours for those of its volumes."""
    kept = ("PATH", "INFERQ_CACHE", "XDG_CACHE_HOME")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    for variable in container["env"]:
        value = variable.get("value", "cpu-0")
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        if any(value.startswith(mount) for mount in mounts):
            value = str(tmp_path / value.strip("/"))
        environment[variable["name"]] = value
    # what was compiled and imported before serves these tests too
    environment["INFERQ_CACHE"] = os.environ.get(
        "INFERQ_CACHE", str(Path.home() / ".cache" / "inferq")
    )
    return environment


def status(port: int, probe: dict[str, Any]) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{probe['path']}", timeout=10).status_code
    except httpx.ConnectError:
        return 0


def run_helm_test(pod: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run what the pod of `helm test` runs."""
    [container] = pod["spec"]["containers"]
    program = container["command"]
    assert program[:2] == ["python", "-c"]
    return subprocess.run(
        [sys.executable, "-P", *program[1:]],
        env={variable["name"]: variable["value"] for variable in container["env"]},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_it_becomes_ready_serves_and_ends_when_it_is_told_to(
    helm4: Any, valkey_url: str, queue: str, smollm2: Path, tmp_path: Path
) -> None:
    port = free_port()
    rendering = rendering_of(helm4, valkey_url, queue, smollm2, port)
    [pod], [helm_test] = rendering.workers(), rendering.of_kind("Pod")
    container = pod.main
    startup, ready = (container[p]["httpGet"] for p in ("startupProbe", "readinessProbe"))
    command = [sys.executable, "-P", "-m", "inferq", *container["args"]]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, env=environment_of(container, tmp_path), stderr=log) as worker,
    ):
        deadline = time.monotonic() + 300
        while status(port, ready) != 200:
            assert worker.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        assert status(port, startup) == 200
        assert worker.pid in healthcheck.serving_processes()
        assert port in {each for _, each in healthcheck.listening_addresses(worker.pid)}
        assert healthcheck.main([str(worker.pid)]) == 0
        done = run_helm_test(helm_test)
        assert done.returncode == 0, done.stderr
        assert f"{queue}: smollm2 answered" in done.stdout
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        assert f'inferq_worker_ready{{model_name="smollm2",queue="{queue}"}} 1' in metrics
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0, (tmp_path / "log").read_text()
