"""What a call hands out, moves or reads has a bound in bytes, and nothing is left for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferq.protocol import stream_pages
from inferq.protocol.keys import Lane
from inferq.protocol.replies import ClaimedJob, ClaimReply
from inferq.protocol.stream_pages import read_pages
from inferq.protocol.upkeep import UpkeepScripts

ROOT = Path(__file__).parents[2]
#: As in claim.lua.
MAX_CLAIM_BYTES = 2**20
LONG = 400_000
LONGEST = 4 * 2**20


def sizes(jobs: tuple[ClaimedJob, ...]) -> list[int]:
    return [len(job.payload) for job in jobs]


async def claim_all(q: Any, worker: str = "a", **options: Any) -> list[ClaimReply]:
    """Claim at once for as long as a reply asks for it."""
    replies = [await q.claim(worker, **options)]
    while replies[-1].next_due_ms == 0:
        replies.append(await q.claim(worker, **options))
    return replies


def taken(replies: list[ClaimReply]) -> list[str]:
    return [job.job_id for reply in replies for job in reply.claimed]


async def test_a_reply_ends_with_the_job_that_fills_it_and_asks_for_a_claim_at_once(q: Any) -> None:
    ids = [await q.enqueue_long(LONG) for _ in range(8)]
    replies = await claim_all(q)
    assert taken(replies) == ids
    assert [len(reply.claimed) for reply in replies] == [3, 3, 2]
    assert [reply.waiting for reply in replies] == [True, True, False]
    for reply in replies:
        assert sum(sizes(reply.claimed)[:-1]) < MAX_CLAIM_BYTES


async def test_a_job_longer_than_the_bound_is_handed_out_alone(q: Any) -> None:
    ids = [await q.enqueue_long(LONGEST) for _ in range(3)]
    replies = await claim_all(q)
    assert taken(replies) == ids
    assert [len(reply.claimed) for reply in replies][:3] == [1, 1, 1]


async def test_short_jobs_come_in_one_reply(q: Any) -> None:
    ids = [await q.enqueue() for _ in range(500)]
    reply = await q.claim(max_jobs=1000)
    assert [job.job_id for job in reply.claimed] == ids
    assert reply.next_due_ms != 0


async def test_jobs_left_behind_have_the_same_bound(q: Any) -> None:
    ids = [await q.enqueue_long(LONG) for _ in range(8)]
    epochs = {job.job_id: job.epoch for r in await claim_all(q) for job in r.claimed}
    await q.scripts.release("a", [(job_id, epochs[job_id], None) for job_id in ids])
    behind = await q.enqueue_long(LONG)
    replies = await claim_all(q, "b")
    assert [len(reply.claimed) for reply in replies] == [3, 3, 3]
    assert set(taken(replies)) == {*ids, behind}
    assert taken(replies)[-1] == behind


async def test_errands_of_a_full_worker_have_the_same_bound(q: Any) -> None:
    ids = [await q.enqueue_long(LONG, prompt_tokens=0, budget=0) for _ in range(5)]
    replies = await claim_all(q, max_jobs=0, max_errands=8)
    assert taken(replies) == ids
    assert [len(reply.claimed) for reply in replies] == [3, 2]


async def test_jobs_cut_off_do_not_count_as_passed_by(q: Any) -> None:
    ids = [await q.enqueue_long(LONGEST) for _ in range(2)]
    low = [await q.enqueue(lane=Lane.LOW) for _ in range(2)]
    first = await q.claim(starve_ms=0)
    assert taken([first]) == ids[:1]
    fields = await q.redis.hkeys(q.keys.load)
    assert not [name for name in fields if name.startswith(b"blocked:")]
    replies = await claim_all(q, starve_ms=0)
    assert set(taken(replies)) == {ids[1], *low}


async def test_a_full_worker_is_not_asked_to_claim_for_ever(q: Any) -> None:
    for _ in range(4):
        await q.enqueue_long(LONGEST)
    replies = await claim_all(q, max_jobs=1)
    assert len(taken(replies)) == 4
    assert (await q.claim(max_jobs=0)).next_due_ms != 0


async def test_due_jobs_of_long_payloads_are_moved_in_several_calls(q: Any) -> None:
    ids = [await q.enqueue_long(LONGEST, delay_ms=60_000) for _ in range(6)]
    for job_id in ids:
        await q.pass_delay(job_id)
    upkeep = UpkeepScripts(q.redis, q.keys)
    moved = [await upkeep.promote(retention_ms=60_000) for _ in range(3)]
    assert moved == [4, 2, 0]
    assert (await q.scripts.load()).queued == 6


async def test_a_claim_goes_on_at_once_with_due_jobs_that_it_did_not_move(q: Any) -> None:
    ids = [await q.enqueue_long(LONGEST, delay_ms=60_000) for _ in range(6)]
    for job_id in ids:
        await q.pass_delay(job_id)
    assert (await q.claim(max_jobs=0)).next_due_ms == 0
    assert (await q.scripts.load()).delayed == 2


async def test_a_sweep_mends_long_entries_in_several_calls(q: Any) -> None:
    for lane in (Lane.HIGH, Lane.NORMAL):
        for _ in range(6):
            await q.enqueue_long(LONGEST, lane=lane)
    jobs = taken(await claim_all(q))
    await q.redis.zrem(q.keys.leases, *jobs)
    swept = [(await q.scripts.sweep(gone_ms=60_000)).jobs_put_back for _ in range(3)]
    assert swept == [8, 4, 0]


async def test_a_queue_of_long_payloads_is_not_counted_anew(q: Any) -> None:
    upkeep = UpkeepScripts(q.redis, q.keys)
    for _ in range(15):
        await q.enqueue_long(LONGEST)
    assert await upkeep.recount() == 0
    for _ in range(2):
        await q.enqueue_long(LONGEST)
    assert await upkeep.recount() is None


async def test_dead_letters_of_long_payloads_are_read_page_by_page(
    q: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_pages, "PAGE_BYTES", 3000)
    fields = {"kind": "crashed", "payload": b"x" * 1000}
    entries = [(await q.redis.xadd(q.keys.dead, fields)).decode() for _ in range(20)]
    replies: list[int] = []
    xrange = q.redis.xrange

    async def watched(*args: Any, **kwargs: Any) -> Any:
        rows = await xrange(*args, **kwargs)
        replies.append(len(rows))
        return rows

    monkeypatch.setattr(q.redis, "xrange", watched)
    assert [letter.entry_id for letter in await q.scripts.dead_letters()] == entries
    assert max(replies) <= 3
    some = await q.scripts.dead_letters(after=entries[4], count=7)
    assert [letter.entry_id for letter in some] == entries[5:12]
    assert await q.scripts.dead_letters(after=entries[-1]) == []


async def test_pages_grow_while_entries_are_short_and_shrink_when_they_are_long() -> None:
    long = stream_pages.PAGE_BYTES // 2
    lengths = [*[10] * 21, *[long] * 130, *[10] * 20_000]
    counts: list[int] = []

    async def read(start: str, count: int) -> list[Any]:
        after = -1 if start == "-" else int(start.strip("(").split("-")[0])
        counts.append(count)
        rows = lengths[after + 1 :][:count]
        return [(b"%d-0" % n, {b"e": b"x" * size}) for n, size in enumerate(rows, after + 1)]

    read_back = [entry async for page in read_pages(read) for entry, _ in page]
    assert read_back == [b"%d-0" % n for n in range(len(lengths))]
    assert counts[:4] == [1, 4, 16, 64]  # the fourth is the first of long ones
    assert set(counts[4 : 4 + 33]) == {2}
    assert counts[-1] == stream_pages.MAX_PAGE_ENTRIES


def test_the_bound_is_told() -> None:
    assert f"local MAX_BYTES = {MAX_CLAIM_BYTES}\n" in (ROOT / "protocol/lua/claim.lua").read_text()
    assert "1 MiB of payloads" in (ROOT / "docs/protocol.md").read_text()
