"""The examples run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "jobs", "is_right"),
    [
        ("submit_and_stream.py", 1, lambda out: out == "0 1 2 \n"),
        ("many_at_once.py", 5, lambda out: out.count(": 0 1 2  (3 tokens)\n") == 5),
    ],
)
def test_the_example_runs(
    valkey_url: str,
    queue: str,
    worker_thread: Any,
    name: str,
    jobs: int,
    is_right: Callable[[str], bool],
) -> None:
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(worker_thread.serve_jobs, jobs, 3)
        run = subprocess.run(
            [sys.executable, "-P", str(EXAMPLES / name)],
            env={**os.environ, "INFERQ_REDIS_URL": valkey_url, "INFERQ_QUEUE": queue},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        served.result()
    assert run.returncode == 0, run.stderr
    assert is_right(run.stdout), run.stdout
