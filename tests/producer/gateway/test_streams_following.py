"""The events behind a response: split where a client stopped, merged, waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from inferq import AsyncClient, FinishReason, JobCancelled, ResultTimeout, StreamEvent
from inferq.producer.gateway.answers.following import MOST_AT_ONCE, follow, merge


async def events_of(client: AsyncClient, job_id: str, **options: Any) -> list[StreamEvent]:
    waits = {"keep_alive_s": 30.0, "idle_s": 30.0, **options}
    return [event async for events in follow(client, job_id, **waits) for event in events]


@pytest.mark.parametrize("seen", range(13))
async def test_an_event_that_a_client_has_in_part_comes_in_two(
    client: AsyncClient, worker: Any, seen: int
) -> None:
    """As after a take-over, which may publish in larger pieces what was published before."""
    job = await client.submit("Hi")
    claimed, _ = await worker.claim_one()
    await worker.serve(claimed, 12, each=5)
    events = await events_of(client, job.id, seen=seen)
    assert "".join(event.text for event in events) == "".join(f"{k} " for k in range(12))
    assert [token for event in events for token in event.token_ids] == list(range(12))
    ends = [event.next_offset for event in events]
    assert ends == sorted(ends)
    assert seen in (0, *ends)
    before = sum(len(event.token_ids) for event in events if event.next_offset <= seen)
    assert before == seen
    assert [event.finish_reason for event in events][-1] is FinishReason.LENGTH
    assert all(event.finish_reason is None for event in events[:-1])


async def test_silence_is_told_and_ends_when_it_is_too_long(
    client: AsyncClient, worker: Any
) -> None:
    job = await client.submit("Hi")
    found: list[list[StreamEvent]] = []

    async def read() -> None:
        async for events in follow(client, job.id, keep_alive_s=0.1, idle_s=0.3):
            found.append(events)  # noqa: PERF401 - it ends with an error

    with pytest.raises(ResultTimeout, match=r"0\.3 s"):
        await read()
    assert found == [[], []]


async def test_what_is_there_comes_together_and_an_error_after_it(
    client: AsyncClient, worker: Any, words: Callable[[int, int], Any], ending: Callable[..., Any]
) -> None:
    job = await client.submit("Hi")
    claimed, _ = await worker.claim_one()
    for i in range(50):
        await worker.publish(claimed, i, words(i, i + 1))
    batches: list[list[StreamEvent]] = []

    async def read() -> None:
        async for events in follow(client, job.id, keep_alive_s=30, idle_s=30):
            batches.append(events)  # noqa: PERF401 - it ends with an error

    end = ending(50, FinishReason.CANCELLED)
    await worker.publish(claimed, 50, end, terminal=FinishReason.CANCELLED)
    with pytest.raises(JobCancelled):
        await read()
    events = [event for batch in batches for event in batch]
    assert [event.token_ids for event in events] == [(i,) for i in range(50)]
    assert max(len(batch) for batch in batches) == MOST_AT_ONCE


async def test_streams_are_merged_and_the_first_error_ends_them(
    client: AsyncClient, worker: Any
) -> None:
    jobs = [await client.submit("Hi") for _ in range(3)]
    claims = await worker.wait_for_jobs(3)
    for claimed, count in zip(claims, (5, 1, 3), strict=True):
        await worker.serve(claimed, count)
    sources = [follow(client, job.id, keep_alive_s=30, idle_s=30) for job in jobs]
    counts = dict.fromkeys(range(3), 0)
    async for number, events in merge(sources):
        assert events
        assert {event.job_id for event in events} == {jobs[number].id}
        counts[number] += sum(len(event.token_ids) for event in events)
    assert sorted(counts.values()) == [1, 3, 5]

    waiting, cancelled = [await client.submit("Hi") for _ in range(2)]
    await cancelled.cancel()
    sources = [follow(client, job.id, keep_alive_s=30, idle_s=30) for job in (waiting, cancelled)]
    with pytest.raises(JobCancelled):
        assert [event async for event in merge(sources)]


async def test_a_merge_that_is_left_closes_its_sources_and_holds_one_list_of_each() -> None:
    closed: list[int] = []
    taken = dict.fromkeys(range(3), 0)

    async def endless(number: int) -> AsyncGenerator[list[StreamEvent], None]:
        try:
            while True:
                taken[number] += 1
                yield []
                await asyncio.sleep(0)
        finally:
            closed.append(number)

    merged = merge([endless(number) for number in range(3)])
    for _ in range(10):
        await anext(merged)
    await asyncio.sleep(0.05)
    # ten were read; one waits in the middle, and one with each source
    assert sum(taken.values()) <= 10 + 1 + 3
    await merged.aclose()
    assert sorted(closed) == [0, 1, 2]


async def test_a_lone_source_is_closed_with_its_reader(
    client: AsyncClient, worker: Any, words: Callable[[int, int], Any]
) -> None:
    job = await client.submit("Hi")
    claimed, _ = await worker.claim_one()
    await worker.publish(claimed, 0, words(0, 1))
    merged = merge([follow(client, job.id, keep_alive_s=30, idle_s=30)])
    await anext(merged)
    assert _num_followed(client) == 1
    await merged.aclose()
    async with asyncio.timeout(30):
        while _num_followed(client):  # noqa: ASYNC110 - a task of the readers
            await asyncio.sleep(0.01)


def _num_followed(client: AsyncClient) -> int:
    return sum(reader._count for readers in client._readers._readers.values() for reader in readers)
