"""Faults that a queue must survive, each with real workers, on Valkey and on Redis."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from inferq import SamplingParams
from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient, QueueAdmin
from inferq.protocol.errors import JobCancelled, JobNotFound, StreamExpired
from inferq.protocol.keys import GROUP, Lane, QueueKeys
from inferq.protocol.messages import Event
from inferq.protocol.replies import PublishItem
from inferq.protocol.scripts import QueueScripts

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

PROMPT = "Write a long story about a lighthouse."
TOKENS = 40


def greedy(max_tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(
    scope="module", params=["valkey", pytest.param("redis", marks=pytest.mark.slow)], autouse=True
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def binary(kind: str, request: pytest.FixtureRequest) -> str | None:
    if kind == "valkey":
        return None
    request.getfixturevalue("redis_server")  # which skips, or fails, without it
    return shutil.which("redis-server")


@pytest.fixture
def own(binary: str | None, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server of the test's own, which keeps its data in `tmp_path`."""
    with EmbeddedServer(binary=binary, appendonly=True, directory=tmp_path) as server:
        yield server


@pytest.fixture
async def raw(own: EmbeddedServer) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(own.url) as client:
        yield client


@pytest.fixture
async def client(own: EmbeddedServer, queue: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(own.url, queue, reconnect_s=60) as made:
        yield made


async def read_all(stream: Any, seen: int = 0) -> list[int]:
    """The tokens of a stream of one output; each offset must come once, from `seen` on."""
    tokens: list[int] = []
    async for event in stream:
        assert event.offset == seen + len(tokens)
        tokens += event.token_ids
    return tokens


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    give_up = time.monotonic() + 60
    while not await condition():
        assert time.monotonic() < give_up, what
        await asyncio.sleep(0.05)


async def blocks_are_back(own: EmbeddedServer, queue: str) -> None:
    """Wait until every worker reports that no sequence holds a block."""
    async with QueueAdmin(own.url, queue) as admin:
        give_up = time.monotonic() + 20
        while True:
            workers = await admin.workers()
            if workers and all(w.running == 0 and w.free_blocks == w.total_blocks for w in workers):
                return
            counts = [(w.free_blocks, w.cached_blocks, w.total_blocks) for w in workers]
            assert time.monotonic() < give_up, counts
            await asyncio.sleep(0.1)


def first_tokens(event: Event, count: int) -> Event:
    ends = event.text_ends[:count]
    return Event(
        offset=event.offset,
        token_ids=event.token_ids[:count],
        text=event.text[: ends[-1]],
        text_ends=ends,
    )


async def publish_beginning(scripts: QueueScripts, events: list[Event], job: Any, k: int) -> None:
    """Publish the first `k` tokens of an undisturbed run as a worker that then dies."""
    items, total = [], 0
    for event in events:
        if k > total and event.token_ids:
            part = first_tokens(event, k - total)
            total += len(part.token_ids)
            items.append((total, part.encode()))
    assert total == k
    if items:
        await scripts.publish(
            "dead",
            [PublishItem(job.job_id, job.epoch, 0, tuple(items))],
            lease_ms=60_000,
            retention_ms=60_000,
        )


async def test_a_takeover_at_any_offset_goes_on_as_undisturbed(
    start_worker: Any, client: AsyncClient, own: EmbeddedServer, raw: Any, queue: str
) -> None:
    worker = await asyncio.to_thread(start_worker, own.url, queue)
    undisturbed = await client.submit(PROMPT, greedy())
    expected = await undisturbed.result(timeout_s=60)
    keys = QueueKeys(queue)
    scripts = QueueScripts(raw, keys)
    rows = await raw.xrange(keys.out(undisturbed.id))
    events = [Event.decode(fields[b"e"]) for _, fields in rows]
    assert await asyncio.to_thread(worker.stop) == 0
    offsets = (0, 1, 7, TOKENS - 1)
    jobs = [await client.submit(PROMPT, greedy()) for _ in offsets]
    reply = await scripts.claim(
        "dead",
        free_tokens=10**6,
        idle=True,
        max_jobs=10,
        max_model_len=1024,
        block_size=16,
        lease_ms=60_000,
        max_crashes=3,
        retention_ms=60_000,
    )
    for k, job, claimed in zip(offsets, jobs, reply.claimed, strict=True):
        assert claimed.job_id == job.id
        await publish_beginning(scripts, events, claimed, k)
        await raw.zadd(keys.leases, {job.id: 1})
    second = await asyncio.to_thread(start_worker, own.url, queue)
    for job in jobs:
        result = await job.result(timeout_s=60)
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
        assert result.attempts == 2
        assert await read_all(job.stream(timeout_s=5)) == list(expected.token_ids)
    assert await asyncio.to_thread(second.stop) == 0


async def test_a_drain_hands_over_what_has_not_begun_and_what_does_not_end(
    start_worker: Any, client: AsyncClient, own: EmbeddedServer, queue: str
) -> None:
    options = {"max_num_seqs": 3, "drain_timeout_s": 3, "lease_s": 60}
    leaving = await asyncio.to_thread(start_worker, own.url, queue, **options)
    # none of the first three ends before the signal, or others would begin in its place, and the
    # longest takes longer than the grace on any machine
    lengths = [250, 250, 500, *[8] * 5]
    jobs = [await client.submit(PROMPT, greedy(length)) for length in lengths[:3]]
    streams = [job.stream(timeout_s=60) for job in jobs]
    begun = [list((await anext(stream)).token_ids) for stream in streams]
    # later, as claimed jobs begin in the order in which they are prepared
    jobs += [await client.submit(PROMPT, greedy(length)) for length in lengths[3:]]

    async def are_claimed() -> bool:
        return {(await job.status()).state for job in jobs[3:]} == {"running"}

    await until(are_claimed, "the others were not claimed")
    leaving.signal(signal.SIGTERM)

    async def is_handed_back() -> bool:
        return (await jobs[-1].status()).state != "running"

    await until(is_handed_back, "the unstarted were not handed back")
    assert (await jobs[2].status()).owner == leaving.name  # so the grace had not ended
    staying = await asyncio.to_thread(start_worker, own.url, queue, wait=False, lease_s=60)
    assert await asyncio.to_thread(leaving.process.wait, 30) == 0
    rests = await asyncio.gather(
        *(read_all(s, len(b)) for s, b in zip(streams, begun, strict=True))
    )
    await asyncio.gather(*(job.result(timeout_s=60) for job in jobs))
    states = [await job.status() for job in jobs]
    assert [state.crashes for state in states] == [0] * 8
    assert [state.published for state in states] == lengths
    assert [len(b) + len(r) for b, r in zip(begun, rests, strict=True)] == lengths[:3]
    assert states[2].handoffs == 1
    assert all(state.handoffs >= 1 for state in states[3:])
    assert await asyncio.to_thread(staying.stop) == 0


async def test_a_cancel_at_any_moment_gives_one_end_and_all_blocks_back(
    start_worker: Any, client: AsyncClient, own: EmbeddedServer, raw: Any, queue: str
) -> None:
    worker = await asyncio.to_thread(
        start_worker,
        own.url,
        queue,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        report_interval_s=0.2,
        lease_s=20,
    )
    chance = random.Random(5)
    keys = QueueKeys(queue)

    async def one(index: int) -> None:
        # long prompts are cancelled in their prefill, short ones while they decode or end
        prompt = [chance.randrange(1000, 9000) for _ in range(chance.choice((2, 400)))]
        job = await client.submit(prompt, greedy(chance.randrange(1, 40)))
        await asyncio.sleep(chance.uniform(0, 2.5))
        outcome = await job.cancel()
        try:
            await job.result(timeout_s=60)
            assert outcome in ("requested", "finished"), index
        except JobCancelled:
            assert outcome in ("requested", "cancelled"), index
        rows = await raw.xrange(keys.out(job.id))
        ends = [e for e in (Event.decode(f[b"e"]) for _, f in rows) if e.terminal is not None]
        assert len(ends) == 1, index
        assert await raw.ttl(keys.job(job.id)) > 0
        assert await raw.ttl(keys.out(job.id)) > 0

    await asyncio.gather(*(one(index) for index in range(40)))
    [group] = await raw.xinfo_groups(keys.jobs(Lane.NORMAL))
    assert group.get("lag", 0) is not None
    await blocks_are_back(own, queue)
    async with QueueAdmin(own.url, queue) as admin:
        load = (await admin.overview()).load
    assert (load.queued, load.running, load.prompt_tokens, load.budget_tokens) == (0, 0, 0, 0)
    assert await asyncio.to_thread(worker.stop) == 0


def cut(directory: Path, size: int) -> None:
    """Take the end off an append-only file, in whichever place this server keeps it."""
    files = (*directory.glob("appendonlydir/*.incr.aof"), *directory.glob("*.aof"))
    [file] = (path for path in files if path.stat().st_size)
    os.truncate(file, file.stat().st_size - size)


async def test_a_restart_that_lost_the_last_second_is_healed_by_the_worker(
    start_worker: Any, client: AsyncClient, own: EmbeddedServer, queue: str, tmp_path: Path
) -> None:
    worker = await asyncio.to_thread(start_worker, own.url, queue, lease_s=20)
    job = await client.submit(PROMPT, greedy(300))
    stream = job.stream(timeout_s=60)
    seen: list[int] = []
    while len(seen) < 30:
        seen += (await anext(stream)).token_ids
    await asyncio.to_thread(own.kill)
    cut(tmp_path, 3000)
    await asyncio.to_thread(own.restart)
    rest = await read_all(stream, len(seen))
    assert len(seen) + len(rest) == 300
    result = await job.result(timeout_s=5)
    assert list(result.token_ids) == seen + rest
    assert (result.attempts, (await job.status()).crashes) == (1, 0)
    assert await asyncio.to_thread(worker.stop) == 0


async def test_an_emptied_server_ends_readers_and_serves_new_jobs(
    start_worker: Any, client: AsyncClient, own: EmbeddedServer, raw: Any, queue: str
) -> None:
    worker = await asyncio.to_thread(start_worker, own.url, queue)
    job = await client.submit(PROMPT, greedy(400))
    stream = job.stream(timeout_s=30)
    await anext(stream)
    await raw.flushall()
    with pytest.raises((StreamExpired, JobNotFound)):
        await read_all(stream, stream.next_offset)
    fresh = await client.submit(PROMPT, greedy(5))
    assert len((await fresh.result(timeout_s=60)).token_ids) == 5
    assert [g["name"] for g in await raw.xinfo_groups(QueueKeys(queue).jobs(Lane.NORMAL))] == [
        GROUP.encode()
    ]
    assert await asyncio.to_thread(worker.stop) == 0


async def test_a_worker_cut_off_for_longer_than_its_lease_repeats_nothing(
    start_worker: Any,
    client: AsyncClient,
    own: EmbeddedServer,
    queue: str,
    faulty_proxy: Any,
) -> None:
    proxies, workers = {}, {}
    for _ in range(2):
        proxy = await faulty_proxy(own.port)
        worker = await asyncio.to_thread(start_worker, proxy.url, queue, lease_s=5, wait=False)
        proxies[worker.name], workers[worker.name] = proxy, worker

    async def are_there() -> bool:
        return len(await client.workers()) == 2

    await until(are_there, "no two workers")
    job = await client.submit(PROMPT, greedy(400))
    stream = job.stream(timeout_s=60)
    seen = list((await anext(stream)).token_ids)
    owner = (await job.status()).owner
    proxies[owner].cut()

    async def is_taken_over() -> bool:
        return (await job.status()).owner not in (owner, None)

    async def is_dropped() -> bool:
        return "the lease ended" in workers[owner].log.read_text()

    await until(is_taken_over, "no takeover")
    await until(is_dropped, "a lease that ended by the worker's own clock, which was told nothing")
    proxies[owner].heal()
    rest = await read_all(stream, len(seen))
    assert len(seen) + len(rest) == 400
    result = await job.result(timeout_s=5)
    assert (list(result.token_ids), result.attempts) == (seen + rest, 2)
    fresh = [await client.submit(secrets.token_hex(3), greedy(5)) for _ in range(2)]
    assert [len((await each.result(timeout_s=60)).token_ids) for each in fresh] == [5, 5]
    for worker in workers.values():
        assert await asyncio.to_thread(worker.stop) == 0
