"""Gateways on free ports before a worker whose engine is a stand-in.

- `gateway`  a running gateway without keys, with one worker that serves the model `stand-in`
- `stand_in_worker`  that worker; its `say(text)` sets what it answers
- `start_gateway(**settings)`, `start_stand_in(**options)`  more of them, ended with the test
- `http`  a client of `gateway`
- `openai_client`  OpenAI's own
- `no_batches`  before the test there are no files and batches
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
import redis
import structlog

from inferq.protocol.keys import BatchKeys


def _load_stand_in() -> ModuleType:
    name = "gateway_stand_in"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "stand_in.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Any:
    """The tokenizer of the small real model, with its chat template."""
    return _load_stand_in().load_tokenizer(smollm2)


@pytest.fixture
def start_stand_in(valkey_url: str, queue: str, tokenizer: Any) -> Iterator[Callable[..., Any]]:
    """Start workers (`queue`, `model`, `step_s`, … as `StandInWorker` takes them)."""
    started: list[Any] = []

    def start(
        *, queue: str = queue, url: str = valkey_url, tokenizer: Any = tokenizer, **options: Any
    ) -> Any:
        worker = _load_stand_in().StandInWorker(url, queue, tokenizer, **options)
        started.append(worker.start())
        return worker

    yield start
    for worker in started:
        worker.stop()


@pytest.fixture
def start_gateway(valkey_url: str, queue: str) -> Iterator[Callable[..., Any]]:
    """Start gateways of `queue` on free ports, with further settings."""
    from inferq.producer.gateway.settings import GatewaySettings

    started: list[Any] = []

    def start(**settings: Any) -> Any:
        given = {
            "redis_url": valkey_url,
            "queues": (queue,),
            "port": 0,
            "poll_interval_s": 0.1,
            "shutdown_timeout_s": 5.0,
            **settings,
        }
        running = _load_stand_in().RunningGateway(GatewaySettings(**given))
        started.append(running.start())
        return running

    yield start
    for running in started:
        running.stop()


@pytest.fixture
def no_batches(valkey_url: str) -> None:
    """Forget the files and batches of other tests, which are the server's and no queue's."""
    with redis.Redis.from_url(valkey_url) as client:
        for key in client.scan_iter(f"{BatchKeys.PREFIX}*"):
            client.delete(key)


@pytest.fixture
def keep_logging() -> Iterator[None]:
    """Undo at the end what the test did to logging."""
    root = logging.getLogger()
    before = root.handlers, root.level, logging.getLogger("inferq").level
    yield
    root.handlers, root.level = before[:2]
    logging.getLogger("inferq").setLevel(before[2])
    structlog.reset_defaults()


@pytest.fixture
def stand_in_worker(start_stand_in: Callable[..., Any]) -> Any:
    return start_stand_in()


@pytest.fixture
def gateway(stand_in_worker: Any, start_gateway: Callable[..., Any]) -> Any:
    return start_gateway()


@pytest.fixture
def http(gateway: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        yield client


@pytest.fixture
def openai_client(gateway: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client
