"""The demo: however it is ended, nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Demo = subprocess.Popen[bytes]
Leftovers = Any  # of conftest


@pytest.fixture
def demo(smollm2: Path, tmp_path: Path, leftovers: Leftovers) -> Iterator[Demo]:
    """A running demo whose temporary folders lie in `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "inferq", "demo", "--prompt", "Tell a long story."],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    yield process
    process.kill()
    leftovers.kill()
    process.communicate(timeout=10)


def wait_for(said: bytes, demo: Demo) -> None:
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith(said):
            return
    pytest.fail(f"the demo ended without {said!r}")


def test_a_second_ctrl_c_does_not_cut_the_clean_up_short(demo: Demo, leftovers: Leftovers) -> None:
    wait_for(b">", demo)
    assert len(leftovers.processes()) >= 3  # the server, the worker and its engine
    for _ in range(2):
        demo.send_signal(signal.SIGINT)
        time.sleep(0.1)
    _, errors = demo.communicate(timeout=20)
    assert demo.returncode == 130
    assert b"Traceback" not in errors
    leftovers.check_there_are_none()


def test_sigterm_cleans_up_too_while_the_model_loads(demo: Demo, leftovers: Leftovers) -> None:
    wait_for(b"Valkey listens", demo)
    demo.terminate()
    _, errors = demo.communicate(timeout=20)
    assert demo.returncode == 143
    assert b"Traceback" not in errors
    leftovers.check_there_are_none()
