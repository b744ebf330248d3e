"""The command line as a process, against the embedded server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from inferq.cli import main
from inferq.producer import AsyncClient
from inferq.protocol.keys import QueueKeys
from inferq.protocol.scripts import QueueScripts

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


@pytest.fixture
def on_queue(valkey_url: str, queue: str) -> Callable[..., Any]:
    """Run something that takes the queue's scripts and a client, to its end."""

    def call(do: Callable[[QueueScripts, AsyncClient], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            async with (
                redis.asyncio.Redis.from_url(valkey_url) as connection,
                AsyncClient(valkey_url, queue) as client,
            ):
                return await do(QueueScripts(connection, QueueKeys(queue)), client)

        return asyncio.run(run())

    return call


@dataclass(frozen=True)
class Leftovers:
    """What a command that works in a folder, and keeps its temporary files there, has left."""

    folder: Path

    def processes(self) -> list[int]:
        """The processes that work in the folder or below it, which may be gone."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone, or not ours
                if (process / "cwd").readlink().is_relative_to(self.folder):
                    found.append(int(process.name))
        return found

    def kill(self) -> None:
        for number in self.processes():
            os.kill(number, signal.SIGKILL)

    def check_there_are_none(self, timeout_s: float = 10) -> None:
        deadline = time.monotonic() + timeout_s
        while (self.processes() or any(self.folder.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.processes() == []
        assert list(self.folder.iterdir()) == []


@pytest.fixture
def leftovers(tmp_path: Path) -> Leftovers:
    """What is left in `tmp_path`."""
    return Leftovers(tmp_path)
