"""The health port: HTTP as kubelets speak it, and what a worker's probes say when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.runtime import health
from inferq.runtime.health import HealthServer
from inferq.worker.insight.probes import WorkerProbes


@dataclass
class StandInEngine:
    """An engine of which only the progress is known."""

    is_dead: bool = False
    stalled_s: float = 0.0


@dataclass
class Probed:
    engine: StandInEngine
    stop: asyncio.Event
    probes: WorkerProbes
    server: HealthServer

    async def get(self, path: str, method: str = "GET") -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.request(method, f"http://127.0.0.1:{self.server.port}{path}")

    async def send(self, *parts: bytes) -> bytes:
        """The answer to raw bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        for part in parts:
            writer.write(part)
            await writer.drain()
        with contextlib.closing(writer):
            return await reader.read()


@pytest.fixture
async def worker() -> AsyncIterator[Probed]:
    engine, stop = StandInEngine(), asyncio.Event()
    probes = WorkerProbes(engine, stop, step_timeout_s=60)
    async with HealthServer(probes.checks, port=0, host="127.0.0.1") as server:
        yield Probed(engine, stop, probes, server)


async def codes(worker: Probed) -> dict[str, int]:
    return {
        path: (await worker.get(path)).status_code for path in ("/startupz", "/livez", "/readyz")
    }


async def test_a_worker_that_loads_is_alive_and_not_ready(worker: Probed) -> None:
    assert await codes(worker) == {"/startupz": 503, "/livez": 200, "/readyz": 503}
    assert (await worker.get("/readyz")).text == "the model is being loaded\n"


async def test_a_loaded_worker_is_ready_once_its_claims_succeed(worker: Probed) -> None:
    connected = False
    worker.probes.loaded(lambda: connected)
    assert await codes(worker) == {"/startupz": 200, "/livez": 200, "/readyz": 503}
    connected = True
    assert await codes(worker) == {"/startupz": 200, "/livez": 200, "/readyz": 200}


async def test_a_draining_worker_is_alive_and_not_ready(worker: Probed) -> None:
    worker.probes.loaded(lambda: True)
    worker.stop.set()
    assert await codes(worker) == {"/startupz": 200, "/livez": 200, "/readyz": 503}
    assert (await worker.get("/readyz")).text == "draining\n"


async def test_liveness_fails_once_a_step_takes_longer_than_it_may(worker: Probed) -> None:
    worker.probes.loaded(lambda: True)
    worker.engine.stalled_s = 60.0
    assert (await worker.get("/livez")).status_code == 200
    worker.engine.stalled_s = 61.0
    answer = await worker.get("/livez")
    assert (answer.status_code, answer.text) == (503, "the engine has not advanced for 61 s\n")
    worker.engine.stalled_s = 0.0
    assert (await worker.get("/livez")).status_code == 200


async def test_liveness_fails_when_the_engine_has_ended(worker: Probed) -> None:
    worker.probes.loaded(lambda: True)
    worker.engine.is_dead = True
    assert await codes(worker) == {"/startupz": 200, "/livez": 503, "/readyz": 503}


async def test_other_paths_and_methods_are_refused(worker: Probed) -> None:
    assert (await worker.get("/")).status_code == 404
    assert "/readyz" in (await worker.get("/metrics")).text
    answer = await worker.get("/livez", "POST")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


async def test_a_query_is_ignored_and_head_has_no_body(worker: Probed) -> None:
    assert (await worker.get("/livez?verbose")).status_code == 200
    answer = await worker.send(b"HEAD /livez HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\n")


async def test_a_request_may_come_in_pieces(worker: Probed) -> None:
    assert (await worker.send(b"GET /li", b"vez HTTP/1.1\r\nHo", b"st: x\r\n\r\n")).startswith(
        b"HTTP/1.1 200"
    )


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n",
        b"GET /livez\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_a_400(worker: Probed, request_bytes: bytes) -> None:
    assert (await worker.send(request_bytes)).startswith(b"HTTP/1.1 400 ")
    assert (await worker.get("/livez")).status_code == 200


async def test_a_client_that_says_nothing_is_let_go(worker: Probed, monkeypatch) -> None:
    monkeypatch.setattr(health, "REQUEST_TIMEOUT_S", 0.05)
    assert await worker.send(b"GET /livez HTTP/1.1\r\n") == b""


async def test_more_connections_than_may_be_are_closed_and_places_come_back(
    worker: Probed, monkeypatch
) -> None:
    monkeypatch.setattr(health, "MAX_CONNECTIONS", 2)
    idle = [await asyncio.open_connection("127.0.0.1", worker.server.port) for _ in range(2)]
    assert await worker.send() == b""
    for _, writer in idle:
        writer.close()
    await asyncio.sleep(0.05)
    assert (await worker.get("/livez")).status_code == 200


async def test_a_port_that_is_taken_is_named(worker: Probed) -> None:
    other = HealthServer({}, port=worker.server.port, host="127.0.0.1")
    with pytest.raises(InvalidRequestError, match=rf"health_port: .*{worker.server.port}"):
        async with other:
            pass


async def test_leaving_ends_connections_that_are_open() -> None:
    async with HealthServer({}, port=0, host="127.0.0.1") as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.sleep(0.01)
    assert await reader.read() == b""
    writer.close()
