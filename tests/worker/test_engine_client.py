"""How the end of an engine's process is noticed, by processes that are no engines."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

from inferq.protocol.params import SamplingParams
from inferq.worker.pipe import engine_client
from inferq.worker.pipe.engine_client import EngineClient

TIMEOUT_S = 60
#: Says that it is ready, and then does what is put behind this.
READY: Final = """
import os, sys, time
from multiprocessing.connection import Connection
from inferq.worker.pipe.frames import pack
pipe = Connection(int(sys.argv[1]))
pipe.recv_bytes()
info = {"num_blocks": 1, "block_size": 16, "max_model_len": 16, "vocab_size": 2}
pipe.send_bytes(pack(["ready", info]))
"""
LIVES_ON: Final = "pipe.close(); time.sleep(3600)"
RUNS: Final = "time.sleep(3600)"

Start = Callable[[str], EngineClient]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    started: list[EngineClient] = []

    async def start(then: str) -> EngineClient:
        started.append(EngineClient([sys.executable, "-c", READY + then]))
        await asyncio.wait_for(started[-1].start({}), TIMEOUT_S)
        return started[-1]

    yield start
    for engine in started:
        engine.kill()
        await engine.stop()


@pytest.fixture
async def busy_threads() -> AsyncIterator[None]:
    """Keeps every thread of asyncio's own executor in a call."""
    over = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        executor.submit(over.wait)
        yield
        over.set()


@pytest.mark.usefixtures("busy_threads")
async def test_an_engine_that_is_killed_is_dead_whatever_asyncios_threads_do(start: Start) -> None:
    engine = await start(RUNS)
    assert not engine.is_dead
    engine.kill()
    await engine.wait_dead(TIMEOUT_S)
    assert engine.is_dead
    cause = await asyncio.wait_for(engine.cause_of_death(), TIMEOUT_S)
    assert cause.startswith("the engine process ended with status -9")
    await asyncio.wait_for(engine.stop(), TIMEOUT_S)


async def test_an_engine_is_dead_as_soon_as_it_has_closed_its_pipe_and_ends_with_stop(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start(LIVES_ON)
    await engine.wait_dead(TIMEOUT_S)
    assert engine.is_dead
    assert engine._process is not None
    assert engine._process.poll() is None
    monkeypatch.setattr(engine_client, "STOP_TIMEOUT_S", 0.0)
    await asyncio.wait_for(engine.stop(), TIMEOUT_S)
    assert engine._process.returncode == -9


async def test_nothing_is_sent_to_an_engine_that_is_dead(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start("os._exit(7)")
    await engine.wait_dead(TIMEOUT_S)
    for number in range(10):  # asyncio warns of more writes than five
        engine.add(str(number), [1], SamplingParams(max_tokens=1, seed=0))
        engine.abort(str(number))
    assert not caplog.records
    assert await engine.cause_of_death() == "the engine process ended with status 7"
