"""How many lines are told as kept: each once, however often a batch is stopped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inferq.producer.batches.store import BatchStore

pytestmark = pytest.mark.model


async def test_each_line_is_told_once_when_it_is_kept_and_by_how_it_ended(
    make_batch: Any, run_turn: Any, line_of: Any, start_stand_in: Any, store: BatchStore
) -> None:
    worker = start_stand_in()
    worker.say("Hello there")
    lines = [line_of(f"line-{k}") for k in range(30)]
    lines[7], lines[20] = {"no": "line"}, line_of("bad", max_tokens=-1)
    batch = await make_batch(lines)
    told: list[tuple[int, int]] = []

    def kept(completed: int, failed: int) -> None:
        told.append((completed, failed))

    stop = asyncio.Event()
    first = asyncio.create_task(run_turn(stop, window=4, on_kept=kept))
    async with asyncio.timeout(90):
        while len(worker.engine.requests) < 8 and not first.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    stop.set()
    await first
    await run_turn(on_kept=kept)
    ended = await store.batch(batch.id)
    assert ended is not None
    assert ended.counts.completed == 28
    assert (sum(done for done, _ in told), sum(failed for _, failed in told)) == (28, 2)
