"""TLS, and users that may do no more than their part needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient, QueueAdmin
from inferq.producer.gateway.admission.access import Access, KeyLimits
from inferq.producer.gateway.admission.limits import Limiter
from inferq.producer.partitions import Partitions
from inferq.producer.queue_metrics import read_queue
from inferq.producer.tasks.deliveries import DeliveryStore
from inferq.protocol.acl import Role, acl_rules
from inferq.protocol.errors import ServerLost
from inferq.protocol.keys import QueueKeys, TaskKeys
from inferq.protocol.params import SamplingParams
from inferq.protocol.snapshots import BlockSnapshot
from inferq.protocol.upkeep import UpkeepScripts
from inferq.protocol.watching import write_snapshot

ROOT = Path(__file__).parents[2]


@pytest.fixture
def users(server: EmbeddedServer, queue: str) -> Iterator[Callable[[Role], str]]:
    """URLs of users with the documented rights, on each kind of server."""
    with redis.Redis.from_url(server.url) as admin:

        def url_of(role: Role) -> str:
            rules = acl_rules(role, queue).split()
            admin.execute_command("ACL", "SETUSER", f"{queue}-{role}", "on", ">secret", *rules)
            return f"redis://{queue}-{role}:secret@127.0.0.1:{server.port}/0"

        yield url_of
        for role in Role:
            admin.execute_command("ACL", "DELUSER", f"{queue}-{role}")


async def test_the_documented_rights_are_enough_for_a_jobs_whole_life(
    users: Callable[[Role], str], mini_worker: Callable[..., Any], queue: str
) -> None:
    worker = mini_worker(users(Role.WORKER))
    async with AsyncClient(users(Role.PRODUCER), queue) as client:
        await client.ping()
        job = await client.submit("x", idempotency_key="k", deadline_s=60)
        stream = job.stream(timeout_s=10)
        await worker.scripts.register("mini", {"model": "m"})
        [claimed] = await worker.claim()
        await worker.token(claimed, 0)
        assert (await anext(stream)).text == "0 "
        await worker.scripts.heartbeat(
            "mini", [(claimed.job_id, claimed.epoch)], lease_ms=10_000, retention_ms=60_000
        )
        await worker.scripts.recost(
            "mini", claimed.job_id, claimed.epoch, prompt_tokens=1, budget=16
        )
        await worker.scripts.release("mini", [(claimed.job_id, claimed.epoch, None)])
        [claimed] = await worker.claim()
        await worker.scripts.reconcile("mini", [])
        [claimed] = await worker.claim()
        await worker.end(claimed, 1)
        assert [event async for event in stream]
        delayed = await client.submit("x", delay_s=60)
        assert await delayed.cancel() == "cancelled"
        assert [each.name for each in await client.workers()] == ["mini"]
    await worker.scripts.sweep(gone_ms=0)
    await worker.scripts.unregister("mini")


async def test_the_documented_rights_are_enough_for_dead_letters(
    users: Callable[[Role], str], mini_worker: Callable[..., Any], queue: str
) -> None:
    worker = mini_worker(users(Role.WORKER))
    async with AsyncClient(users(Role.PRODUCER), queue) as client:
        await client.submit("x", SamplingParams(max_tokens=1))
        for _ in range(3):
            await worker.claim()
            await worker.scripts.reconcile("mini", [], crashed=True)
        await worker.claim()
    async with QueueAdmin(users(Role.WORKER), queue) as admin:
        assert (await admin.overview()).dead_letters == 1
        [letter] = await admin.dead_letters()
        await admin.redrive(letter.entry_id)
        await admin.drop(letter.entry_id)


async def test_the_documented_rights_are_enough_to_look_at_blocks(
    users: Callable[[Role], str], mini_worker: Callable[..., Any], queue: str
) -> None:
    worker = mini_worker(users(Role.WORKER))
    async with QueueAdmin(users(Role.PRODUCER), queue) as admin:
        await admin.watch()
        assert (await worker.scripts.register("mini", {})).watched
        async with redis.asyncio.Redis.from_url(users(Role.WORKER)) as client:
            snapshot = BlockSnapshot(1, 0, [1, 0, 0, 0], [])
            keys = worker.scripts.keys
            await write_snapshot(client, keys, "mini", snapshot.encode(), lives_ms=60_000)
        assert await admin.block_snapshot("mini") == snapshot
        assert (await admin.overview()).dead_letters == 0
        assert [each.name for each in await admin.workers()] == ["mini"]


async def test_the_documented_rights_are_enough_for_a_gateways_limits(
    users: Callable[[Role], str], mini_worker: Callable[..., Any], queue: str
) -> None:
    worker = mini_worker(users(Role.WORKER))
    access = Access(queue, KeyLimits(requests_per_minute=9, tokens_per_minute=9, max_concurrency=1))
    async with AsyncClient(users(Role.GATEWAY), queue) as client:
        limiter = Limiter(client)
        async with await limiter.admit(access, tokens=3) as admission:
            await limiter.renew()
            admission.used_tokens = 1
            job = await client.submit("x", idempotency_key="k")
            [claimed] = await worker.claim()
            await worker.token(claimed, 0)
            await worker.end(claimed, 1)
            assert (await job.result(timeout_s=10)).text == "0 "
            await client.queue_length()
            await client.workers()
        assert (await limiter.admit(access)).headers["x-ratelimit-remaining-requests"] == "7"
    async with AsyncClient(users(Role.PRODUCER), queue) as client:
        with pytest.raises(ServerLost, match="lacks a permission"):
            await Limiter(client).admit(access)


@pytest.mark.parametrize("role", [Role.GATEWAY, Role.TASKS])
async def test_the_documented_rights_are_enough_for_a_queues_figures(
    users: Callable[[Role], str], queue: str, role: Role
) -> None:
    url = users(role)
    async with QueueAdmin(url, queue) as admin:
        figures = await read_queue(admin)
    assert (figures.num_workers, figures.overview.dead_letters) == (0, 0)
    if role is Role.TASKS:
        partitions = Partitions(url, queue, 1, timeout_s=10)
        store = DeliveryStore(partitions.server_of(TaskKeys.PREFIX), queue)
        assert (await store.count_due(), await store.count_dead()) == (0, 0)
        server = partitions.server(0)
        scripts = UpkeepScripts(server.commands, QueueKeys(queue))
        assert await server.call(scripts.outbox_length) == 0
        await partitions.aclose()


def test_the_rights_for_several_queues_name_each() -> None:
    rules = acl_rules(Role.GATEWAY, "a", "b")
    assert "~inferq:{a.*}:* ~inferq:{b.*}:* ~inferq:{gateway}:* ~inferq:{batches}:*" in rules


async def test_a_producer_reaches_no_other_queue_and_claims_nothing(
    users: Callable[[Role], str], mini_worker: Callable[..., Any], queue: str
) -> None:
    url = users(Role.PRODUCER)
    async with AsyncClient(url, f"{queue}x") as stranger:
        with pytest.raises(ServerLost, match="lacks a permission"):
            await stranger.submit("x")
    async with AsyncClient(url, queue) as client:
        await client.submit("x")
    with pytest.raises(ServerLost, match="lacks a permission"):
        await mini_worker(url).claim()


def test_the_documentation_has_the_rules_of_every_role() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    for role in Role:
        assert acl_rules(role, "default") in text


async def test_a_job_is_served_over_tls(
    tls_url: str, certificate: Path, mini_worker: Callable[..., Any], queue: str
) -> None:
    url = f"{tls_url}?ssl_ca_certs={certificate / 'cert.pem'}"
    worker = mini_worker(url)
    async with AsyncClient(url, queue) as client:
        job = await client.submit("x")
        [claimed] = await worker.claim()
        await worker.token(claimed, 0)
        await worker.end(claimed, 1)
        assert (await job.result(timeout_s=10)).text == "0 "
    async with AsyncClient(tls_url, queue) as distrustful:
        with pytest.raises(ServerLost, match=r"(?i)certificate"):
            await distrustful.ping()
