"""A real worker tells what its blocks hold: while somebody watches, the truth, and nothing more."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from inferq import Client, SamplingParams
from inferq.producer import QueueAdmin
from inferq.protocol.keys import QueueKeys
from inferq.protocol.snapshots import BlockSnapshot, short_id

TIMEOUT_S = 120.0
NUM_BLOCKS = 96
PROMPT = [9] * 64


@pytest.fixture(scope="module")
def queue() -> str:
    return "test-block-snapshots"


@pytest.fixture(scope="module")
def worker(start_worker: Any, valkey_url: str, queue: str) -> Any:
    return start_worker(valkey_url, queue, num_kv_blocks=NUM_BLOCKS, report_interval_s=0.5)


@pytest.fixture
def client(connect: Callable[[str, str], Client], worker: Any) -> Client:
    return connect(worker.url, worker.queue)


async def snapshot_of(admin: QueueAdmin, worker: Any, wanted: Callable[[Any], Any]) -> Any:
    """Watch until there is a snapshot as it is wanted."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        await admin.watch()
        snapshot = await admin.block_snapshot(worker.name)
        if snapshot is not None and wanted(snapshot):
            return snapshot
    raise AssertionError(f"the last snapshot was {snapshot}")


async def test_the_blocks_of_a_running_job_are_its_outputs_and_cached_once_it_has_ended(
    client: Client, worker: Any
) -> None:
    async with QueueAdmin(worker.url, worker.queue) as admin:
        with redis.Redis.from_url(worker.url) as server:
            assert not server.exists(QueueKeys(worker.queue).blocks(worker.name))
        await snapshot_of(admin, worker, lambda s: not s.sequences)  # it knows that it is watched
        job = client.submit(PROMPT, SamplingParams(n=2, max_tokens=700, ignore_eos=True, seed=1))
        busy: BlockSnapshot = await snapshot_of(admin, worker, lambda s: len(s.sequences) == 2)
        job.cancel()
        assert (busy.num_blocks, busy.num_host_blocks) == (NUM_BLOCKS, 0)
        assert [(s.job, s.index) for s in busy.sequences] == [
            (short_id(job.id), 0),
            (short_id(job.id), 1),
        ]
        counts = busy.counts()
        assert counts["shared"] == len(PROMPT) // 16
        private = [-(-(s.num_tokens - 1) // 16) - len(PROMPT) // 16 for s in busy.sequences]
        assert counts["used"] == sum(private)  # the last token is not computed, and has no block
        idle: BlockSnapshot = await snapshot_of(admin, worker, lambda s: not s.sequences)
        counts = idle.counts()
        assert counts["used"] == counts["shared"] == 0
        assert counts["cached"] >= len(PROMPT) // 16
        assert counts["free"] + counts["cached"] == NUM_BLOCKS

        [info] = [each for each in await admin.workers() if each.name == worker.name]
        assert (info.state, info.total_blocks) == ("serving", NUM_BLOCKS)
        assert info.generated_tokens > 0
        assert info.prompt_tokens == len(PROMPT)
