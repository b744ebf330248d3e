"""Submitting: what arrives, what is refused, and that nothing arrives twice."""

from __future__ import annotations

import asyncio
import inspect
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
import redis.asyncio

from inferq.producer import AsyncClient, Client
from inferq.producer.prompt import prompt_token_bound
from inferq.protocol.errors import (
    IdempotencyConflict,
    InvalidRequestError,
    JobNotFound,
    QueueFull,
)
from inferq.protocol.messages import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from inferq.protocol.params import MAX_SEED, SamplingParams


async def test_a_job_arrives_as_it_was_submitted(client: AsyncClient, worker: Any) -> None:
    params = SamplingParams(temperature=0.5, seed=7, max_tokens=5, stop=["x"])
    handle = await client.submit(
        "Größe", params, metadata={"user": "u1"}, model="smol", lane="high"
    )
    assert handle.created
    claimed, job = await worker.claim_one()
    assert (job.id, job.prompt, job.params) == (handle.id, TextPrompt("Größe"), params)
    assert (job.metadata, job.model, claimed.lane) == ({"user": "u1"}, "smol", "high")
    # 7 bytes of UTF-8, a margin, and the budget
    assert claimed.cost == 7 + 8 + 5


@pytest.mark.parametrize(
    ("options", "cost"),
    [
        ({"n": 4, "max_tokens": 5}, 3 + 4 * 5),
        ({"best_of": 3, "max_tokens": 5}, 3 + 3 * 5),
        ({"beam_width": 2, "max_tokens": 5}, 3 + 2 * 5),
        ({"truncate_prompt_tokens": 2, "max_tokens": 5}, 2 + 5),
        ({"truncate_prompt_tokens": -1, "max_tokens": 5}, 3 + 5),
        ({"n": 4, "max_tokens": None}, 2**31 - 1),
    ],
)
async def test_the_cost_is_of_every_candidate(
    client: AsyncClient, worker: Any, options: dict[str, Any], cost: int
) -> None:
    await client.submit([1, 2, 3], SamplingParams(**options))
    claimed, job = await worker.claim_one()
    assert claimed.cost == cost
    assert job.cache_salt is None


async def test_a_cache_salt_arrives_and_is_no_other_content(
    client: AsyncClient, worker: Any
) -> None:
    first = await client.submit("x", cache_salt="mine", idempotency_key="k")
    _, job = await worker.claim_one()
    assert job.cache_salt == "mine"
    again = await client.submit("x", cache_salt="other", idempotency_key="k")
    assert (again.id, again.created) == (first.id, False)


@pytest.mark.parametrize("salt", ["", "x" * 257, 5, "\ud800"])
async def test_a_bad_cache_salt_is_refused(client: AsyncClient, salt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.submit("x", cache_salt=salt)
    assert caught.value.field == "cache_salt"


@pytest.mark.parametrize(
    ("prompt", "arrives"),
    [
        ([1, 2, 3], TokenPrompt((1, 2, 3))),
        ((5,), TokenPrompt((5,))),
        (range(3), TokenPrompt((0, 1, 2))),
        ([{"role": "user", "content": "hi"}], ChatPrompt((ChatMessage("user", "hi"),))),
        ([ChatMessage("user", "hi")], ChatPrompt((ChatMessage("user", "hi"),))),
    ],
)
async def test_token_ids_and_chats_arrive_too(
    client: AsyncClient, worker: Any, prompt: Any, arrives: Any
) -> None:
    await client.submit(prompt)
    _, job = await worker.claim_one()
    assert job.prompt == arrives


async def test_messages_can_be_given_by_name(client: AsyncClient, worker: Any) -> None:
    await client.submit(messages=[{"role": "user", "content": "hi"}])
    _, job = await worker.claim_one()
    assert job.prompt == ChatPrompt((ChatMessage("user", "hi"),))


async def test_a_seed_is_drawn_for_each_job_without_one(client: AsyncClient, worker: Any) -> None:
    await client.submit("a")
    await client.submit("a")
    jobs = [(await worker.claim_one())[1] for _ in range(2)]
    seeds = [job.params.seed for job in jobs]
    assert all(isinstance(s, int) and 0 <= s <= MAX_SEED for s in seeds)
    assert seeds[0] != seeds[1]


def test_the_cost_bound_is_exact_for_token_ids_and_above_the_bytes_otherwise() -> None:
    assert prompt_token_bound(TokenPrompt((1, 2, 3))) == 3
    assert prompt_token_bound(TextPrompt("ďďď")) > len("ďďď".encode())
    chat = ChatPrompt((ChatMessage("user", "x" * 100), ChatMessage("user", "y")))
    # a template adds a few marks to each message, and perhaps a system prompt of its own
    assert prompt_token_bound(chat) >= 101 + 2 * (4 + 8) + 32
    # and one line does not look like a long document
    one = ChatPrompt((ChatMessage("user", "Hello!"),))
    assert prompt_token_bound(one) == 10 + 128


async def test_whole_numbers_of_other_types_are_token_ids(client: AsyncClient, worker: Any) -> None:
    await client.submit(list(np.array([5, 6, 7], dtype=np.int64)))
    _, job = await worker.claim_one()
    assert job.prompt == TokenPrompt((5, 6, 7))


async def test_the_queue_limit_comes_from_the_environment(
    valkey_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERQ_QUEUE_LIMIT", "1")
    async with AsyncClient(valkey_url, queue) as client:
        await client.submit("x")
        with pytest.raises(QueueFull):
            await client.submit("x")
    async with AsyncClient(valkey_url, queue, queue_limit=2) as client:
        await client.submit("x")
    for text in ("0", "many", "-1", "1.5"):
        monkeypatch.setenv("INFERQ_QUEUE_LIMIT", text)
        with pytest.raises(InvalidRequestError, match="INFERQ_QUEUE_LIMIT"):
            AsyncClient(valkey_url, queue)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": b"bytes"}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt_token_ids"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "x" * 10_000_000}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [-1]}, "prompt_token_ids"),
        ({"prompt": [1.5]}, "prompt_token_ids"),
        ({"prompt": [True]}, "prompt_token_ids"),
        ({"prompt": ["text"]}, "prompt_token_ids"),
        ({"prompt": [{"role": "user"}]}, "messages.content"),
        ({"prompt": [{"role": "user", "content": "x", "sender": "y"}]}, "messages.sender"),
        ({"prompt": [{"role": "user", "content": "x"}, 1]}, "messages"),
        ({"prompt": [{"role": "user", "content": b"x"}]}, "messages.content"),
        ({"prompt": [{"role": "\ud800", "content": "x"}]}, "messages.role"),
        ({"prompt": None, "messages": []}, "messages"),
        ({"prompt": None, "messages": "hi"}, "messages"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"lane": "urgent"}, "lane"),
        ({"lane": None}, "lane"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": -1}, "deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"deadline_s": 1e12}, "deadline_s"),
        ({"delay_s": -0.5}, "delay_s"),
        ({"delay_s": True}, "delay_s"),
        ({"delay_s": 10, "deadline_s": 5}, "deadline_s"),
        ({"not_before": datetime(2030, 1, 1)}, "not_before"),
        ({"not_before": "tomorrow"}, "not_before"),
        ({"not_before": datetime.now(UTC), "delay_s": 1}, "not_before"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "k" * 257}, "idempotency_key"),
        ({"idempotency_key": 5}, "idempotency_key"),
        ({"idempotency_key": "\udcff"}, "idempotency_key"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 2000}}, "metadata"),
        ({"metadata": {str(i): "x" for i in range(100)}}, "metadata"),
        ({"metadata": "text"}, "metadata"),
        ({"model": ""}, "model"),
        ({"model": "m" * 1000}, "model"),
        ({"params": {"temperature": 1}}, "params"),
    ],
)
async def test_bad_input_is_refused_with_the_field_named(
    client: AsyncClient, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.submit(**{"prompt": "x", **arguments})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert len(str(caught.value)) < 500


async def test_a_number_in_an_error_has_all_its_digits(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError, match=r"delay_s: 1000000000000 s .* than 2592000\b"):
        await client.submit("x", delay_s=1e12)


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [({"temperature": -1.0}, "[0, inf)"), ({"top_p": 0.0}, "(0, 1]"), ({"max_tokens": 0}, None)],
)
def test_bad_sampling_parameters_name_their_limit(
    arguments: dict[str, Any], limit: str | None
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**arguments)
    assert caught.value.field in arguments
    assert limit is None or caught.value.limit == limit


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"url": "http://localhost"}, "url"),
        ({"url": "localhost:6379"}, "url"),
        ({"url": "redis://user:secret@host:port/0"}, "url"),
        ({"url": "redis://localhost/first"}, "url"),
        ({"queue": "a b"}, "queue"),
        ({"queue": 5}, "queue"),
        ({"queue_limit": 0}, "queue_limit"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"retention_s": -1}, "retention_s"),
        ({"retention_s": 0.0001}, "retention_s"),
        ({"retention_s": 11 * 365 * 86_400}, "retention_s"),
        ({"retention_s": 1e306}, "retention_s"),
        ({"retention_s": float("nan")}, "retention_s"),
    ],
)
async def test_bad_client_settings_are_refused_at_once(
    arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        AsyncClient(**arguments)
    assert caught.value.field == field
    assert "secret" not in str(caught.value)


async def test_the_same_key_and_content_is_one_job_and_other_content_a_conflict(
    client: AsyncClient, worker: Any
) -> None:
    first = await client.submit("a", idempotency_key="key")
    again = await client.submit("a", idempotency_key="key")
    assert (first.created, again.created) == (True, False)
    assert again.id == first.id
    with pytest.raises(IdempotencyConflict) as caught:
        await client.submit("b", idempotency_key="key")
    assert caught.value.job_id == first.id
    with pytest.raises(IdempotencyConflict):
        await client.submit("a", SamplingParams(seed=1), idempotency_key="key")
    assert len(await worker.claim(max_jobs=10)) == 1
    # the second handle follows the same stream
    (queued,) = await asyncio.gather(again.status())
    assert queued.state == "running"


async def test_a_full_queue_says_so_with_the_numbers(valkey_url: str, queue: str) -> None:
    async with AsyncClient(valkey_url, queue, queue_limit=2) as client:
        await client.submit("a")
        await client.submit("b")
        with pytest.raises(QueueFull) as caught:
            await client.submit("c")
        assert (caught.value.depth, caught.value.limit) == (2, 2)


async def test_a_delayed_job_starts_no_sooner(client: AsyncClient, worker: Any) -> None:
    by_delay = await client.submit("a", delay_s=0.3)
    by_time = await client.submit("b", not_before=datetime.now(UTC) + timedelta(seconds=0.3))
    past = await client.submit("c", not_before=datetime.now(UTC) - timedelta(days=1))
    assert [c.job_id for c in await worker.claim(max_jobs=3)] == [past.id]
    assert (await by_delay.status()).state == "delayed"
    await asyncio.sleep(0.35)
    assert {c.job_id for c in await worker.claim(max_jobs=3)} == {by_delay.id, by_time.id}


async def test_status_and_cancel_follow_a_job(client: AsyncClient, worker: Any) -> None:
    handle = await client.submit("a", deadline_s=60)
    assert (await handle.status()).state == "queued"
    claimed, _ = await worker.claim_one()
    status = await handle.status()
    assert (status.state, status.owner, status.attempts) == ("running", "fake", 1)
    assert await handle.cancel() == "requested"
    await worker.serve(claimed, 1)
    assert await handle.cancel() == "finished"
    assert (await handle.status()).state == "done"


async def test_an_unknown_job_is_not_found(client: AsyncClient) -> None:
    stranger = client.job("0" * 32 + "-0")
    with pytest.raises(JobNotFound):
        await stranger.status()
    with pytest.raises(JobNotFound):
        await stranger.cancel()
    for bad in ("x", "", 5, None, "0" * 32 + "-9999"):
        with pytest.raises(InvalidRequestError, match="job_id"):
            client.job(bad)  # type: ignore[arg-type]


async def test_workers_are_listed_with_the_age_of_their_report(
    client: AsyncClient, worker: Any
) -> None:
    assert await client.workers() == []
    report = {"model": "smol", "adapters": ["a", "b"], "blocks": 64, "free": 60, "peak": 9}
    await worker.scripts.register("w1", report)
    (info,) = await client.workers()
    assert (info.name, info.model, info.total_blocks, info.free_blocks) == ("w1", "smol", 64, 60)
    assert (info.peak_blocks, info.running, info.adapters) == (9, 0, ("a", "b"))
    assert 0 <= info.age_s < 5


async def test_jobs_and_clients_show_no_password_in_their_repr(
    valkey_server: Any, queue: str
) -> None:
    client = AsyncClient(f"redis://user:secret@127.0.0.1:{valkey_server.port}/0?password=p2", queue)
    assert "secret" not in repr(client)
    assert "p2" not in repr(client)
    assert f"127.0.0.1:{valkey_server.port}" in repr(client)
    assert queue in repr(client)
    await client.aclose()


async def test_url_and_queue_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, valkey_client: redis.asyncio.Redis, valkey_url: str, queue: str
) -> None:
    monkeypatch.setenv("INFERQ_REDIS_URL", valkey_url)
    monkeypatch.setenv("INFERQ_QUEUE", queue)
    async with AsyncClient() as client:
        handle = await client.submit("a")
    assert await valkey_client.exists(f"inferq:{{{queue}.0}}:job:{handle.id}")


async def test_a_job_is_found_by_its_idempotency_key_in_any_partition(
    valkey_url: str, queue: str
) -> None:
    async with AsyncClient(valkey_url, queue, partitions=3) as client:
        for key in ("a", "b", "c", "d"):
            made = await client.submit("x", idempotency_key=key)
            found = await client.find_job(key)
            assert found is not None
            assert found.id == made.id
        assert await client.find_job("unknown") is None
        with pytest.raises(InvalidRequestError, match="idempotency_key"):
            await client.find_job("")


def test_the_synchronous_client_mirrors_the_asynchronous_one() -> None:
    # `result` of an id, which a program that may not await has most use for
    own = {"aclose", "close", "connections", "result"}
    names = {name for name in dir(AsyncClient) if not name.startswith("_")} - own
    assert names == {name for name in dir(Client) if not name.startswith("_")} - own
    for name in names:
        ours, theirs = (getattr(kind, name) for kind in (Client, AsyncClient))
        if callable(ours):
            assert list(inspect.signature(ours).parameters) == list(
                inspect.signature(theirs).parameters
            ), name
