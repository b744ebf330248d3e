"""What `helm test` runs, before a real gateway and a worker whose engine is a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "helm" / "files" / "submit.py"
MODEL = "stand-in"


def run(url: str, queue: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("INFERQ_")}
    environment = {
        "INFERQ_REDIS_URL": url,
        "MODELS": json.dumps({queue: MODEL}),
        "PROMPT": "The capital of France is",
        "TIMEOUT_S": "30",
    }
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.read_text()],
        env=inherited | environment | variables,
        capture_output=True, text=True, check=False, timeout=90,
    )  # fmt: skip


@pytest.mark.model
def test_it_passes_where_a_worker_answers_and_the_gateway_is_ready_and_asks_no_proxy(
    gateway: Any, valkey_url: str, queue: str
) -> None:
    proxies = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    done = run(valkey_url, queue, GATEWAY_URL=gateway.url, **proxies)
    assert done.returncode == 0, done.stderr
    assert f"{queue}: {MODEL} answered" in done.stdout
    assert "gateway: 200" in done.stdout


@pytest.mark.model
def test_it_fails_where_the_queue_serves_another_model(
    stand_in_worker: Any, valkey_url: str, queue: str
) -> None:
    done = run(valkey_url, queue, MODELS=json.dumps({queue: "another"}))
    assert done.returncode != 0
    assert "another" in done.stderr


def test_it_fails_where_no_worker_answers_in_time(valkey_url: str, queue: str) -> None:
    done = run(valkey_url, queue, TIMEOUT_S="0.2")
    assert done.returncode != 0
    assert "ResultTimeout" in done.stderr
