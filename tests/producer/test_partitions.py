"""A queue in several partitions: where its jobs go, and that all of them are seen."""

from __future__ import annotations

import pytest
import redis.asyncio

from inferq.producer import AsyncClient, QueueAdmin
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import QueueKeys, partition_of
from inferq.protocol.scripts import QueueScripts


async def test_jobs_spread_over_all_partitions(valkey_url: str, queue: str) -> None:
    async with AsyncClient(valkey_url, queue, partitions=3) as client:
        ids = [(await client.submit("x")).id for _ in range(60)]
        assert {partition_of(job_id) for job_id in ids} == {0, 1, 2}
        assert (await client.job(ids[0]).status()).state == "queued"
    async with QueueAdmin(valkey_url, queue, partitions=3) as admin:
        assert (await admin.overview()).load.queued == 60


async def test_an_idempotency_key_finds_its_job_in_its_partition(
    valkey_url: str, queue: str
) -> None:
    async with AsyncClient(valkey_url, queue, partitions=7) as client:
        for key in ("a", "b", "c", "d"):
            first = await client.submit("x", idempotency_key=key)
            second = await client.submit("x", idempotency_key=key)
            assert (first.id, first.created, second.created) == (second.id, True, False)


async def test_workers_of_all_partitions_are_listed(
    valkey_url: str, queue: str, valkey_client: redis.asyncio.Redis
) -> None:
    for partition in (0, 1):
        await QueueScripts(valkey_client, QueueKeys(queue, partition)).register("w", {})
    async with AsyncClient(valkey_url, queue, partitions=2) as client:
        found = [(worker.name, worker.partition) for worker in await client.workers()]
    assert found == [("w", 0), ("w", 1)]


@pytest.mark.parametrize("partitions", [0, -1, 1025, True, 1.5, "2"])
def test_an_impossible_number_of_partitions_is_refused(partitions: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"partitions: must be a whole number in \[1,"):
        AsyncClient(partitions=partitions)  # type: ignore[arg-type]


def test_the_number_of_partitions_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFERQ_PARTITIONS", "many")
    with pytest.raises(InvalidRequestError, match=r"INFERQ_PARTITIONS: .* not many"):
        AsyncClient()


@pytest.mark.parametrize("kind", [AsyncClient, QueueAdmin])
@pytest.mark.parametrize("field", ["url", "queue"])
def test_an_empty_place_is_not_one_left_out(
    kind: type[AsyncClient | QueueAdmin], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        kind(**{field: ""})
    assert caught.value.field == field


@pytest.mark.parametrize("kind", [AsyncClient, QueueAdmin])
@pytest.mark.parametrize("name", ["INFERQ_REDIS_URL", "INFERQ_QUEUE", "INFERQ_PARTITIONS"])
def test_an_empty_variable_is_not_one_left_out(
    kind: type[AsyncClient | QueueAdmin], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "")
    with pytest.raises(InvalidRequestError) as caught:
        kind()
    assert caught.value.field == name
