"""Which queue a model's jobs go to, and what is said when nobody serves it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import redis.asyncio

from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient
from inferq.producer.gateway import directory as directory_module
from inferq.producer.gateway.admission.access import Access
from inferq.producer.gateway.app import create_app
from inferq.producer.gateway.directory import Directory
from inferq.producer.gateway.drain_rate import DrainRate
from inferq.producer.gateway.errors import HttpError, ModelNotServed, NoWorker
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.keys import QueueKeys
from inferq.protocol.scripts import QueueScripts


@pytest.fixture
async def make_directory(valkey_url: str) -> AsyncIterator[Callable[..., Directory]]:
    async with AsyncExitStack() as stack:

        def make(
            *queues: str, url: str = valkey_url, timeout_s: float = 30.0, **settings: Any
        ) -> Directory:
            clients = {queue: AsyncClient(url, queue, timeout_s=timeout_s) for queue in queues}
            for client in clients.values():
                stack.push_async_callback(client.aclose)
            given = {"redis_url": url, "queues": queues, **settings}
            return Directory(GatewaySettings(**given), clients)

        yield make


@pytest.fixture
def report(valkey_client: redis.asyncio.Redis) -> Callable[..., Any]:
    """Write a worker's report, as the worker does."""

    async def write(
        queue: str,
        model: str,
        *,
        length: int = 100,
        name: str = "w",
        adapters: tuple[str, ...] = (),
    ) -> None:
        scripts = QueueScripts(valkey_client, QueueKeys(queue))
        state = {"model": model, "max_model_len": length, "adapters": list(adapters)}
        await scripts.register(name, state)

    return write


def not_served(directory: Directory, model: str | None) -> HttpError:
    with pytest.raises(HttpError) as raised:
        directory.find(model)
    return raised.value


async def test_a_model_is_found_on_the_queue_whose_worker_serves_it(
    make_directory: Callable[..., Directory], report: Callable[..., Any], queue: str
) -> None:
    other = f"{queue}-2"
    await report(queue, "a", length=100)
    await report(queue, "a", length=50, name="w2", adapters=("a-polite",))
    await report(other, "org/b")
    directory = make_directory(queue, other)
    await directory.look()
    found = directory.find("a")
    assert (found.queue, found.is_alive, found.max_model_len) == (queue, True, 50)
    assert found.client.queue == queue
    assert directory.find("org/b").queue == other
    assert directory.find("a-polite").parent == "a"
    assert [each.model for each in directory.served()] == ["a", "a-polite", "org/b"]
    assert directory.num_alive == 3
    error = not_served(directory, "nope")
    assert isinstance(error, ModelNotServed)
    assert "a, a-polite, org/b" in error.message
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    error = not_served(directory, None)
    assert (error.status, error.param) == (400, "model")


async def test_a_key_sees_the_models_that_it_may_use(
    make_directory: Callable[..., Directory], report: Callable[..., Any], queue: str
) -> None:
    await report(queue, "a")
    await report(queue, "b", name="w2")
    directory = make_directory(queue)
    await directory.look()
    access = Access("k", models=frozenset({"a"}))
    assert directory.find("a", access).model == directory.find(None, access).model == "a"
    for model, status in (("b", 403), ("nope", 404)):
        with pytest.raises(HttpError) as raised:
            directory.find(model, access)
        assert raised.value.status == status
        assert "Served are: a." in raised.value.message or status == 403
    with pytest.raises(HttpError, match="Served are: none"):
        directory.find(None, Access("k", models=frozenset({"other"})))


async def test_without_a_name_the_only_model_is_meant(
    make_directory: Callable[..., Directory], report: Callable[..., Any], queue: str
) -> None:
    await report(queue, "a", adapters=("a-polite",))
    directory = make_directory(queue)
    await directory.look()
    assert directory.find(None).model == "a"


async def test_a_model_of_two_queues_goes_to_the_first_and_is_warned_of_once(
    make_directory: Callable[..., Directory],
    report: Callable[..., Any],
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warnings: list[dict[str, Any]] = []
    monkeypatch.setattr(
        directory_module.logger, "warning", lambda _, **fields: warnings.append(fields)
    )
    first, second = f"{queue}-1", f"{queue}-2"
    await report(first, "a")
    await report(second, "a")
    directory = make_directory(first, second)
    await directory.look()
    await directory.look()
    assert directory.find("a").queue == first
    assert warnings == [{"model": "a", "queue": first, "other": second}]
    placed = make_directory(first, second, models={"a": second})
    await placed.look()
    assert placed.find("a").queue == second
    assert len(warnings) == 1


async def test_without_a_living_worker_it_is_a_503_that_says_when_to_try_again(
    make_directory: Callable[..., Directory], queue: str
) -> None:
    directory = make_directory(queue)
    await directory.look()
    for model in ("a", None):
        error = not_served(directory, model)
        assert isinstance(error, NoWorker)
        assert (error.status, error.headers["Retry-After"]) == (503, "5")
    assert directory.num_alive == 0


async def test_a_model_whose_workers_went_away_is_a_503_for_a_while_then_a_404(
    make_directory: Callable[..., Directory],
    report: Callable[..., Any],
    queue: str,
    valkey_client: redis.asyncio.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await report(queue, "a")
    await report(queue, "b", name="w2")
    directory = make_directory(queue)
    await directory.look()
    await QueueScripts(valkey_client, QueueKeys(queue)).unregister("w")
    await directory.look()
    assert not_served(directory, "a").status == 503
    monkeypatch.setattr(directory_module, "REMEMBERED_S", -1.0)
    await directory.look()
    assert not_served(directory, "a").status == 404


async def test_a_worker_that_fell_silent_serves_nothing(
    make_directory: Callable[..., Directory],
    report: Callable[..., Any],
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await report(queue, "a")
    monkeypatch.setattr("inferq.producer.workers.ALIVE_S", -1.0)
    directory = make_directory(queue)
    await directory.look()
    assert not_served(directory, "a").status == 503


async def test_jobs_of_known_models_may_wait_for_a_worker(
    make_directory: Callable[..., Directory], report: Callable[..., Any], queue: str
) -> None:
    directory = make_directory(queue, models={"a": queue})
    await directory.look()
    assert not_served(directory, "a").status == 503
    directory = make_directory(queue, models={"a": queue}, accept_without_workers=True)
    await directory.look()
    found = directory.find("a")
    assert (found.queue, found.is_alive, found.max_model_len) == (queue, False, 0)
    await report(queue, "a", length=77)
    await directory.look()
    assert directory.find("a").is_alive
    assert directory.find("a").max_model_len == 77


async def test_a_server_that_is_away_changes_nothing_but_readiness(
    make_directory: Callable[..., Directory], queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer() as server:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            await QueueScripts(client, QueueKeys(queue)).register("w", {"model": "a"})
        directory = make_directory(queue, url=server.url, timeout_s=1.0)
        assert not directory.is_current
        await directory.look()
        assert directory.is_current
        server.kill()
        await directory.look()
        assert directory.find("a").is_alive
        monkeypatch.setattr(directory_module, "STALE_S", 0.0)
        monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() + 5)
        assert not directory.is_current


def test_the_drain_rate_is_that_of_the_last_minute() -> None:
    rate = DrainRate()
    assert rate.seconds_for(1) is None
    rate.note(100, 0.0)
    assert rate.seconds_for(1) is None
    rate.note(110, 20.0)
    assert rate.seconds_for(1) == 2.0
    assert rate.seconds_for(5) == 10.0
    for second in range(21, 200):
        rate.note(110 + 4 * (second - 20), float(second))
    assert rate.seconds_for(8) == pytest.approx(2.0)
    rate.note(3, 201.0)  # another server
    assert rate.seconds_for(1) is None


async def test_a_full_queues_wait_follows_from_its_rate(
    make_directory: Callable[..., Directory], queue: str
) -> None:
    directory = make_directory(queue)
    assert directory.retry_after(queue) == 5
    view = directory._views[queue]
    view.rate.note(0, 0.0)
    view.rate.note(10, 100.0)
    assert directory.retry_after(queue, 3) == 30
    assert directory.retry_after(None, 3) == 30


async def test_readiness_and_health_follow_the_server_and_the_workers(
    valkey_url: str, queue: str, report: Callable[..., Any]
) -> None:
    settings = GatewaySettings(redis_url=valkey_url, queues=(queue,), poll_interval_s=0.05)  # type: ignore[arg-type]
    app = create_app(settings)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503  # nobody has looked yet
        async with app.router.lifespan_context(app):
            assert (await client.get("/readyz")).status_code == 200
            health = await client.get("/health")
            assert health.status_code == 503
            assert health.json() == {"status": "no worker is alive", "workers": 0, "requests": 0}
            await report(queue, "a")
            async with asyncio.timeout(20):
                while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (await client.head("/health")).status_code == 200
            app.state.gateway.in_flight.is_ending = True
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/livez")).status_code == 200
