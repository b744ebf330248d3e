"""Real workers on a real server with the small real model."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from proxy import FaultyProxy

from inferq import Client
from inferq.protocol.keys import QueueKeys

#: Enough for a model's load while other tests use the cores.
READY_TIMEOUT_S = 90.0


@dataclass(frozen=True)
class GreedyCase:
    """A prompt, the reference's greedy continuation, and the gap of its two best logits."""

    name: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    top2_gap: list[float]
    text: str

    @property
    def sure(self) -> int:
        """How many leading tokens do not hang on rounding (gaps of 1e-3 and more)."""
        close = [i for i, gap in enumerate(self.top2_gap) if gap < 1e-3]
        return close[0] if close else len(self.token_ids)


def _read_greedy_cases() -> list[GreedyCase]:
    path = Path(__file__).parent / "greedy_smollm2.json"
    return [GreedyCase(**case) for case in json.loads(path.read_text())["cases"]]


@pytest.fixture(scope="session")
def greedy_cases() -> list[GreedyCase]:
    return _read_greedy_cases()


@dataclass
class WorkerProcess:
    """A worker started as its users start it."""

    name: str
    url: str
    queue: str
    log: Path
    process: subprocess.Popen[bytes]

    def wait_ready(self) -> None:
        keys = QueueKeys(self.queue)
        deadline = time.monotonic() + READY_TIMEOUT_S
        with redis.Redis.from_url(self.url) as client:
            while not client.hexists(keys.workers, self.name):
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.05)

    def signal(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = 40.0) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(timeout_s)


@dataclass
class WorkerFactory:
    model: Path
    folder: Path
    started: list[WorkerProcess] = field(default_factory=list)

    def __call__(
        self, url: str, queue: str, *, wait: bool = True, **settings: Any
    ) -> WorkerProcess:
        name = f"worker-{len(self.started)}"
        log = self.folder / f"{name}.log"
        options = {
            "model": self.model,
            "redis_url": url,
            "queue": queue,
            "worker_name": name,
            "lease_s": 5.0,  # a loaded machine must be able to renew it
            "max_model_len": 1024,
            "num_kv_blocks": 512,
            **settings,
        }
        arguments = [
            part
            for key, value in options.items()
            for part in (f"--{key.replace('_', '-')}", str(value))
        ]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "inferq", "worker", *arguments], stderr=stream
            )
        worker = WorkerProcess(name, url, queue, log, process)
        self.started.append(worker)
        if wait:
            worker.wait_ready()
        return worker


@pytest.fixture(scope="module")
def start_worker(
    smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerFactory]:
    """Starts workers that end with the module."""
    factory = WorkerFactory(smollm2, tmp_path_factory.mktemp("workers"))
    yield factory
    for worker in factory.started:
        if worker.process.poll() is None:
            worker.kill()


@pytest.fixture
def connect() -> Iterator[Callable[[str, str], Client]]:
    """Makes clients that are closed with the test."""
    clients: list[Client] = []

    def make(url: str, queue: str) -> Client:
        clients.append(Client(url, queue=queue))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
async def faulty_proxy() -> AsyncIterator[Callable[[int], Any]]:
    """Starts proxies of `tests/chaos` before a port; they end with the test."""
    async with AsyncExitStack() as stack:

        async def start(port: int) -> Any:
            proxy = FaultyProxy(port, random.Random(0))
            await proxy.start()
            stack.push_async_callback(proxy.aclose)
            return proxy

        yield start
