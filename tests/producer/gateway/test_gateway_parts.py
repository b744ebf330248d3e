"""The parts of a gateway that run beside its requests: a fault of ours does not end them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inferq.producer.gateway import gateway as gateway_module
from inferq.producer.gateway.errors import HttpError
from inferq.producer.gateway.gateway import Gateway
from inferq.producer.gateway.in_flight import InFlight
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.errors import QueueFull


@pytest.fixture
def built(valkey_url: str, queue: str) -> Gateway:
    return Gateway.build(GatewaySettings(redis_url=valkey_url, queues=(queue,)))  # type: ignore[arg-type]


async def test_a_part_that_fails_runs_again(
    built: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway_module, "RESTART_S", 0.01)
    looks = 0
    twice = asyncio.Event()

    async def run() -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise KeyError("a fault")
        twice.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(built.directory, "run", run)
    async with built.running():
        await asyncio.wait_for(twice.wait(), 30)
    assert looks == 2


async def test_the_wait_for_a_full_queue_counts_its_excess(built: Gateway, queue: str) -> None:
    rate = built.directory._views[queue].rate
    rate.note(0, 0.0)
    rate.note(10, 20.0)
    error = built.to_http_error(QueueFull("full", depth=104, limit=100), queue)
    assert (error.status, error.headers["Retry-After"]) == (429, "10")
    assert built.to_http_error(QueueFull("no memory"), queue).headers["Retry-After"] == "2"
    assert built.to_http_error(KeyError("x")).status == 500
    async with built.running():
        pass


async def test_requests_in_flight_are_counted_limited_and_refused_at_the_end() -> None:
    in_flight = InFlight(2)
    await in_flight.wait_idle()
    with in_flight.slot(), in_flight.slot():
        assert len(in_flight) == 2
        with pytest.raises(HttpError, match="serves 2 requests already"), in_flight.slot():
            pass
    await in_flight.wait_idle()
    in_flight.closing.set()
    with pytest.raises(HttpError, match="shutting down") as raised, in_flight.slot():
        pass
    assert raised.value.status == 503


async def test_its_clients_are_closed_at_the_end(built: Gateway, queue: str) -> None:
    async with built.running():
        await built.clients[queue].ping()
    client: Any = built.clients[queue]
    with pytest.raises(Exception, match="closed"):
        await client.ping()
