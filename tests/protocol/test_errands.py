"""Jobs of cost 0: they wait for no room, and leave nothing in the books."""

from __future__ import annotations

from typing import Any

import pytest

from inferq.protocol.keys import Lane
from inferq.protocol.messages import FinishReason
from inferq.protocol.replies import JobState, Load


async def errand(q: Any, **options: Any) -> str:
    job_id: str = await q.enqueue(prompt=0, budget=0, **{"lane": Lane.HIGH, **options})
    return job_id


def ids(reply: Any) -> list[str]:
    return [job.job_id for job in reply.claimed]


async def test_a_worker_without_room_or_places_is_given_errands(q: Any) -> None:
    waits = await q.enqueue()
    asked = [await errand(q) for _ in range(3)]
    reply = await q.claim(free=0, max_jobs=0, max_errands=2)
    assert ids(reply) == asked[:2]
    assert [job.space for job in reply.claimed] == [0, 0]
    assert reply.waiting
    assert ids(await q.claim(free=0, max_jobs=0, max_errands=8)) == asked[2:]
    assert ids(await q.claim(max_errands=8)) == [waits]


async def test_errands_take_no_places_of_other_jobs(q: Any) -> None:
    jobs = [await q.enqueue(lane=Lane.HIGH) for _ in range(2)]
    asked = await errand(q)
    reply = await q.claim(max_jobs=2, max_errands=1)
    assert ids(reply) == [*jobs, asked]


async def test_an_errand_behind_a_job_that_does_not_fit_waits_for_it(q: Any) -> None:
    large = await q.enqueue(lane=Lane.HIGH, prompt=500, budget=100)
    asked = await errand(q)
    assert ids(await q.claim(free=64, max_errands=8)) == []
    assert ids(await q.claim(max_errands=8)) == [large, asked]


async def test_an_errand_passes_a_job_of_another_lane_that_holds_all_up(q: Any) -> None:
    await q.enqueue(prompt=500, budget=100)
    small = await q.enqueue(lane=Lane.LOW)
    await q.claim(free=64, max_jobs=0)
    await q.claim(free=0)
    asked = await errand(q)
    reply = await q.claim(free=64, starve_ms=0, max_errands=8)
    assert ids(reply) == [asked]
    assert (await q.scripts.status(small)).state is JobState.QUEUED


async def test_a_worker_with_places_for_errands_waits_for_arrivals_in_empty_lanes(q: Any) -> None:
    await q.enqueue()
    with_errands = await q.claim(free=0, max_jobs=0, max_errands=8)
    assert with_errands.lane_tails[Lane.HIGH] == "0-0"
    assert with_errands.lane_tails[Lane.NORMAL] == ""
    without = await q.claim(free=0, max_jobs=0)
    assert without.lane_tails[Lane.HIGH] == ""


async def test_a_claim_that_knows_no_errands_takes_them_as_jobs(q: Any) -> None:
    asked = [await errand(q) for _ in range(3)]
    assert ids(await q.claim(free=0, max_jobs=2)) == asked[:2]


async def test_an_errand_is_taken_over_without_room(q: Any) -> None:
    asked, other = await errand(q), await errand(q)
    await q.claim("a", max_errands=8)
    await q.end_lease(asked)
    reply = await q.claim("b", free=0, max_jobs=0, max_errands=8)
    assert [(job.job_id, job.crashes) for job in reply.claimed] == [(asked, 1)]
    assert ids(await q.claim("b", free=0, max_jobs=0, max_errands=8)) == []
    assert (await q.scripts.status(other)).owner == "a"


async def test_an_errand_that_was_given_back_is_claimed_again(q: Any) -> None:
    asked = await errand(q)
    [job] = (await q.claim("a", max_errands=8)).claimed
    assert await q.scripts.release("a", [(asked, job.epoch, None)]) == 1
    assert ids(await q.claim("b", free=0, max_jobs=0, max_errands=1)) == [asked]


async def test_a_worker_that_makes_way_for_a_suspect_takes_no_errands(q: Any) -> None:
    suspect = await q.enqueue()
    await q.claim("a")
    await q.end_lease(suspect)
    asked = await errand(q)
    busy = await q.claim("b", max_crashes=2, max_errands=8)
    assert ids(busy) == []
    alone = await q.claim("b", max_crashes=2, idle=True, max_errands=8)
    assert [(job.job_id, job.runs_alone) for job in alone.claimed] == [(suspect, True)]
    assert ids(await q.claim("c", max_crashes=2, max_errands=8)) == [asked]


async def test_errands_leave_nothing_in_the_books(q: Any) -> None:
    ended, cancelled, late = [await errand(q, deadline_ms=60_000) for _ in range(3)]
    assert await q.scripts.load() == Load(queued=3)
    await q.cancel(cancelled)
    await q.pass_deadline(late)
    [job] = (await q.claim(free=0, max_jobs=0, max_errands=8)).claimed
    assert job.job_id == ended
    item = q.item(job, first=0, tokens=3, end=FinishReason.STOP)
    await q.publish("a", item)
    await q.assert_nothing_is_left()
    assert (await q.scripts.length(limit=5)).finished_total == 3


@pytest.mark.parametrize("crashes", [1, 3])
async def test_an_errand_that_kills_workers_is_a_dead_letter_that_can_be_redriven(
    q: Any, crashes: int
) -> None:
    asked = await errand(q, note=b"whose it is")
    for _ in range(crashes):
        await q.claim(max_errands=8, idle=True, max_crashes=crashes)
        await q.end_lease(asked)
    await q.claim(max_crashes=crashes)
    [letter] = await q.scripts.dead_letters()
    assert (letter.prompt_tokens, letter.budget) == (0, 0)
    again = await q.scripts.redrive(letter.entry_id)
    assert (await q.scripts.status(again)).note == b"whose it is"
    [job] = (await q.claim(free=0, max_jobs=0, max_errands=1)).claimed
    await q.end("a", job)
    await q.assert_nothing_is_left()
