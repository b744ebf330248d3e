"""Limits of API keys: counted by the server for all gateways, and given back what was not used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import redis.asyncio

from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient
from inferq.producer.gateway.admission.access import ANYONE, Access, KeyLimits
from inferq.producer.gateway.admission.limits import LEASE_S, Limiter, format_wait
from inferq.producer.gateway.errors import HttpError
from inferq.protocol.errors import ServerLost
from inferq.protocol.keys import GatewayKeys


@pytest.fixture
async def client(server: EmbeddedServer, queue: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, queue, timeout_s=30) as made:
        yield made


@pytest.fixture
def limiter(client: AsyncClient) -> Limiter:
    return Limiter(client)


@pytest.fixture
def access(queue: str) -> Callable[..., Access]:
    def make(**limits: int) -> Access:
        return Access(queue, KeyLimits(**limits))  # the queue's name is no other test's

    return make


async def refusal(limiter: Limiter, access: Access, **asked: int) -> HttpError:
    with pytest.raises(HttpError) as raised:
        await limiter.admit(access, **asked)
    assert raised.value.status == 429
    assert raised.value.code == "rate_limit_exceeded"
    return raised.value


async def test_without_limits_the_server_is_not_asked(queue: str) -> None:
    limiter = Limiter(AsyncClient("redis://127.0.0.1:1/0", queue))
    for access in (ANYONE, Access("a")):
        async with await limiter.admit(access, tokens=10**9) as admission:
            assert admission.headers == {}


async def test_requests_beyond_a_minutes_worth_wait_for_their_share(
    limiter: Limiter, access: Callable[..., Access]
) -> None:
    key = access(requests_per_minute=3)
    left = []
    for _ in range(3):
        admission = await limiter.admit(key)
        left.append(admission.headers["x-ratelimit-remaining-requests"])
        await admission.release()
    assert left == ["2", "1", "0"]
    assert admission.headers["x-ratelimit-limit-requests"] == "3"
    assert "x-ratelimit-limit-tokens" not in admission.headers
    error = await refusal(limiter, key)
    assert "3 requests per minute" in error.message
    assert 1 <= int(error.headers["Retry-After"]) <= 20
    assert error.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_budget_comes_back_evenly(limiter: Limiter, access: Callable[..., Access]) -> None:
    """One in each 100 ms, and not all of them after a minute."""
    key = access(requests_per_minute=600)
    for _ in range(600):
        await (await limiter.admit(key)).release()
    async with asyncio.timeout(30):
        while True:
            try:
                admission = await limiter.admit(key)
                break
            except HttpError:
                await asyncio.sleep(0.01)
    await admission.release()
    # what comes back in the 30 s that there were at most
    assert int(admission.headers["x-ratelimit-remaining-requests"]) < 300


async def test_tokens_are_charged_by_their_bound_and_corrected_at_the_end(
    limiter: Limiter, access: Callable[..., Access]
) -> None:
    key = access(tokens_per_minute=1000)
    async with await limiter.admit(key, tokens=900) as first:
        assert int(first.headers["x-ratelimit-remaining-tokens"]) <= 110
        error = await refusal(limiter, key, tokens=900)
        assert "1000 tokens per minute" in error.message
        assert 30 <= int(error.headers["Retry-After"]) <= 48
        first.used_tokens = 10
    async with await limiter.admit(key, tokens=900) as second:
        assert int(second.headers["x-ratelimit-remaining-tokens"]) >= 90
    await refusal(limiter, key, tokens=900)  # whose usage nobody learnt stays charged


async def test_a_request_larger_than_a_minutes_worth_needs_a_full_budget_and_makes_debts(
    limiter: Limiter, access: Callable[..., Access]
) -> None:
    key = access(tokens_per_minute=1000)
    admission = await limiter.admit(key, tokens=5000)
    assert admission.headers["x-ratelimit-remaining-tokens"] == "0"
    assert admission.headers["x-ratelimit-reset-tokens"].startswith(("5m", "4m59"))
    error = await refusal(limiter, key, tokens=1)
    assert 230 <= int(error.headers["Retry-After"]) <= 241
    admission.used_tokens = 200
    await admission.release()
    assert await limiter.admit(key, tokens=700)


async def test_concurrent_jobs_are_counted_until_they_are_released(
    limiter: Limiter, access: Callable[..., Access]
) -> None:
    key = access(max_concurrency=3)
    first = await limiter.admit(key, streams=2)
    second = await limiter.admit(key)
    error = await refusal(limiter, key)
    assert "3 jobs at once" in error.message
    assert error.headers["Retry-After"] == "1"
    await first.release()
    await first.release()  # does nothing
    third = await limiter.admit(key, streams=2)
    await refusal(limiter, key)
    await second.release()
    await third.release()
    with pytest.raises(HttpError, match="makes 4 jobs, and this API key may run 3") as raised:
        await limiter.admit(key, streams=4)
    assert raised.value.status == 400


async def test_a_refused_request_is_charged_nothing(
    limiter: Limiter, access: Callable[..., Access]
) -> None:
    key = access(requests_per_minute=10, tokens_per_minute=100, max_concurrency=1)
    held = await limiter.admit(key, tokens=10)
    for _ in range(5):
        await refusal(limiter, key, tokens=10)
    await held.release()
    admission = await limiter.admit(key, tokens=10)
    assert admission.headers["x-ratelimit-remaining-requests"] == "8"
    assert int(admission.headers["x-ratelimit-remaining-tokens"]) >= 80


async def test_slots_of_a_gateway_that_died_are_free_after_their_lease(
    limiter: Limiter,
    access: Callable[..., Access],
    client: AsyncClient,
    redis_client: redis.asyncio.Redis,
) -> None:
    key = access(max_concurrency=1)
    slots = GatewayKeys(key.key_id or "").slots
    dead = Limiter(client)
    await dead.admit(key)
    await refusal(limiter, key)
    [(name, ends_at_ms)] = await redis_client.zrange(slots, 0, -1, withscores=True)
    seconds, microseconds = await redis_client.time()
    left_s = ends_at_ms / 1000 - seconds - microseconds / 1e6
    assert 0 < left_s <= LEASE_S
    await redis_client.zincrby(slots, -1000 * LEASE_S, name)  # as if that time had gone by
    async with await limiter.admit(key):
        await refusal(limiter, key)


async def test_leases_of_what_is_held_are_renewed(
    limiter: Limiter, access: Callable[..., Access], redis_client: redis.asyncio.Redis
) -> None:
    key = access(max_concurrency=10)
    slots = GatewayKeys(key.key_id or "").slots
    held = await limiter.admit(key, streams=2)
    ended = await limiter.admit(key)
    before = await redis_client.zrange(slots, 0, -1, withscores=True)
    await ended.release()
    await asyncio.sleep(0.02)
    await limiter.renew()
    after = dict(await redis_client.zrange(slots, 0, -1, withscores=True))
    assert len(after) == 2  # what was released stays so
    assert all(after[name] > score for name, score in before if name in after)
    await held.release()
    assert await redis_client.exists(slots) == 0


async def test_a_repeated_call_is_charged_once(
    limiter: Limiter, access: Callable[..., Access], client: AsyncClient
) -> None:
    """A lost reply makes the client ask again."""
    real = client.run

    async def twice(operation, *, slot_key):  # type: ignore[no-untyped-def]
        await real(operation, slot_key=slot_key)
        return await real(operation, slot_key=slot_key)

    key = access(requests_per_minute=10, tokens_per_minute=100, max_concurrency=1)
    client.run = twice  # type: ignore[method-assign]
    admission = await limiter.admit(key, tokens=60)
    assert admission.headers["x-ratelimit-remaining-requests"] == "9"
    admission.used_tokens = 20
    await admission.release()
    client.run = real  # type: ignore[method-assign]
    again = await limiter.admit(key, tokens=10)
    assert 69 <= int(again.headers["x-ratelimit-remaining-tokens"]) <= 90


async def test_two_gateways_count_together(
    limiter: Limiter, access: Callable[..., Access], client: AsyncClient
) -> None:
    key, other = access(max_concurrency=1), Limiter(client)
    async with await other.admit(key):
        await refusal(limiter, key)
    async with await limiter.admit(key):
        await refusal(other, key)


async def test_a_release_happens_although_its_request_is_cancelled(
    limiter: Limiter, access: Callable[..., Access]
) -> None:
    key = access(max_concurrency=1)

    is_held = asyncio.Event()

    async def stream() -> None:
        async with await limiter.admit(key):
            is_held.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(stream())
    await is_held.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    await limiter.aclose()
    async with await limiter.admit(key):
        pass


async def test_a_server_that_is_away_is_said_and_a_release_survives_it(
    queue: str, access: Callable[..., Access]
) -> None:
    key = access(max_concurrency=1)
    with EmbeddedServer() as server:
        async with AsyncClient(server.url, queue, timeout_s=5) as client:
            limiter = Limiter(client)
            admission = await limiter.admit(key)
            server.kill()
            await admission.release()
            await limiter.renew()
            with pytest.raises(ServerLost):
                await limiter.admit(key)


async def test_the_servers_keys_expire(
    limiter: Limiter, access: Callable[..., Access], redis_client: redis.asyncio.Redis
) -> None:
    key = access(requests_per_minute=10, max_concurrency=1)
    keys = GatewayKeys(key.key_id or "")
    admission = await limiter.admit(key)
    assert 60_000 < await redis_client.pttl(keys.budget) <= 130_000
    assert 0 < await redis_client.pttl(keys.slots) <= 60_000
    await admission.release()


def test_waits_are_written_as_openai_writes_them() -> None:
    waits = [format_wait(ms) for ms in (0, 20, 1000, 1500, 59_999, 60_000, 361_250)]
    assert waits == ["0ms", "20ms", "1s", "1.5s", "59.999s", "1m0s", "6m1.25s"]
