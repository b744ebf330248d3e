"""The demo: however it is ended, nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

Demo = subprocess.Popen[bytes]


def started_in(folder: Path) -> list[int]:
    """The processes that work in a folder below `folder`, which may be gone."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or not ours
            if str((process / "cwd").readlink()).startswith(f"{folder}/"):
                found.append(int(process.name))
    return found


@pytest.fixture
def demo(smollm2: Path, tmp_path: Path) -> Iterator[Demo]:
    """A running demo whose temporary folders lie in `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "inferq", "demo", "--prompt", "Tell a long story."],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    yield process
    process.kill()
    for number in started_in(tmp_path):
        os.kill(number, signal.SIGKILL)
    process.communicate(timeout=10)


def wait_for(said: bytes, demo: Demo) -> None:
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith(said):
            return
    pytest.fail(f"the demo ended without {said!r}")


def check_nothing_is_left(folder: Path) -> None:
    deadline = time.monotonic() + 2
    while started_in(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started_in(folder) == []
    assert list(folder.iterdir()) == []


def test_a_second_ctrl_c_does_not_cut_the_clean_up_short(demo: Demo, tmp_path: Path) -> None:
    wait_for(b">", demo)
    assert len(started_in(tmp_path)) >= 3  # the server, the worker and its engine
    for _ in range(2):
        demo.send_signal(signal.SIGINT)
        time.sleep(0.1)
    _, errors = demo.communicate(timeout=20)
    assert demo.returncode == 130
    assert b"Traceback" not in errors
    check_nothing_is_left(tmp_path)


def test_sigterm_cleans_up_too_while_the_model_loads(demo: Demo, tmp_path: Path) -> None:
    wait_for(b"Valkey listens", demo)
    demo.terminate()
    _, errors = demo.communicate(timeout=20)
    assert demo.returncode == 143
    assert b"Traceback" not in errors
    check_nothing_is_left(tmp_path)
