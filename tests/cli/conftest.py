"""The command line as a process, against the embedded server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inferq.cli import main

Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def environment(valkey_url: str, queue: str) -> dict[str, str]:
    return {**os.environ, "INFERQ_REDIS_URL": valkey_url, "INFERQ_QUEUE": queue}


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    """Run `inferq` with arguments to its end."""

    def call(*arguments: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
        command: list[str | bytes] = [sys.executable, "-P", "-m", "inferq", *arguments]
        return subprocess.run(
            command,
            capture_output=True,
            env={**environment, **options.pop("env", {})},
            timeout=30,
            check=False,
            **options,
        )

    return call


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start `inferq` with arguments; ended with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def call(*arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "inferq", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run_here(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """Run `inferq` in this process; return its exit code, output and errors."""
    for name in ("INFERQ_REDIS_URL", "INFERQ_QUEUE"):
        monkeypatch.setenv(name, environment[name])

    def call(*arguments: str | bytes) -> tuple[int, str, str]:
        try:
            code = main([os.fsdecode(argument) for argument in arguments])
        except SystemExit as exit_:  # argparse
            code = exit_.code if isinstance(exit_.code, int) else 1
        output, errors = capsys.readouterr()
        return code, output, errors

    return call
