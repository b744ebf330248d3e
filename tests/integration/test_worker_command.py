"""The worker's command line: what is wrong is said in a line, with its exit code, in seconds."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from inferq.embedded import EmbeddedServer


def run_worker(*arguments: str, timeout_s: float = 30) -> tuple[int, str, float]:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "inferq", "worker", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stderr, time.monotonic() - started


def run_within(seconds: float, *arguments: str) -> tuple[int, str]:
    """Run a worker that must end in time, again if other work on the machine delayed it."""
    for _ in range(3):
        code, message, taken = run_worker(*arguments)
        if taken < seconds:
            return code, message
    raise AssertionError(f"three runs took longer than {seconds} s, the last {taken:.1f} s")


@pytest.mark.model
def test_a_server_that_is_not_there_is_named_within_five_seconds(smollm2: Path) -> None:
    code, message = run_within(5, "--model", str(smollm2), "--redis-url", "redis://127.0.0.1:1/0")
    assert code == 3
    assert "127.0.0.1:1" in message
    assert "Traceback" not in message


@pytest.mark.model
def test_a_wrong_password_is_said_and_not_shown(smollm2: Path) -> None:
    with EmbeddedServer(password="right") as server:
        url = f"redis://:wrong-pw@127.0.0.1:{server.port}/0"
        code, message = run_within(5, "--model", str(smollm2), "--redis-url", url)
    assert code == 3
    assert "password" in message.lower()
    assert "wrong-pw" not in message
    assert "Traceback" not in message


def test_a_model_that_is_not_there_is_named(valkey_url: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    code, message, _ = run_worker("--model", missing, "--redis-url", valkey_url)
    assert code == 2
    assert message.splitlines()[-1].startswith("inferq: model:")
    assert missing in message
    assert "Traceback" not in message


def test_a_folder_without_a_model_is_named(valkey_url: str, tmp_path: Path) -> None:
    code, message, _ = run_worker("--model", str(tmp_path), "--redis-url", valkey_url)
    assert code == 2
    assert str(tmp_path) in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--model"),
        (["--model", "m", "--block-size", "0"], "--block-size"),
        (["--model", "m", "--queue", "no spaces"], "queue"),
        (["--model", "m", "--lease-s", "soon"], "--lease-s"),
        (["--model", "m", "--starve-s", "inf"], "--starve-s"),
        (["--model", "m", "--redis-url", "http://x"], "--redis-url"),
    ],
)
def test_a_wrong_setting_is_named(arguments: list[str], named: str) -> None:
    code, message, _ = run_worker(*arguments)
    assert code == 2
    assert named in message
    assert "Traceback" not in message
