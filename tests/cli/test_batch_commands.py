"""`inferq batch list`, `status` and `cancel`: what operators see of gateways' batches."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from inferq.producer import AsyncClient
from inferq.producer.batches.records import (
    BatchRecord,
    FileRecord,
    Terms,
    new_batch_id,
    new_file_id,
)
from inferq.producer.batches.store import BatchStore
from inferq.protocol.keys import BatchKeys

RunHere = Callable[..., tuple[int, str, str]]


@pytest.fixture
def make_batch(valkey_url: str, queue: str) -> Callable[..., BatchRecord]:
    """Record a batch as a gateway does; those of other tests are forgotten before."""
    with redis.Redis.from_url(valkey_url) as client:
        for key in client.scan_iter(f"{BatchKeys.PREFIX}*"):
            client.delete(key)

    async def record(owner: str | None) -> BatchRecord:
        now = int(time.time())
        file = FileRecord(
            id=new_file_id(), bytes=3, created_at=now, filename="in", purpose="batch", owner=owner
        )
        batch = BatchRecord(
            id=new_batch_id(),
            endpoint="/v1/completions",
            input_file_id=file.id,
            created_at=now,
            expires_at=now + 3600,
            owner=owner,
            metadata={"customer": "7"},
            terms=Terms(queues=(queue,)),
        )
        async with AsyncClient(valkey_url, queue) as client:
            store = BatchStore(client)
            await store.create_file(file)
            await store.create_batch(batch)
        return batch

    return lambda owner=None: asyncio.run(record(owner))


def test_batches_are_listed_by_key(run_here: RunHere, make_batch: Callable[..., Any]) -> None:
    mine, other = make_batch(), make_batch("alice")
    code, output, _ = run_here("batch", "list")
    assert code == 0
    assert mine.id in output
    assert other.id not in output
    assert "validating" in output
    code, output, _ = run_here("batch", "list", "--key", "alice", "--json", "--count", "5")
    assert [json.loads(line)["id"] for line in output.splitlines()] == [other.id]


def test_a_batch_is_shown_and_cancelled(run_here: RunHere, make_batch: Callable[..., Any]) -> None:
    made = make_batch("alice")
    code, output, _ = run_here("batch", "status", made.id)
    assert code == 0
    assert f"id: {made.id}" in output
    assert "lines: 0 in all, 0 done, 0 failed" in output
    code, output, _ = run_here("batch", "status", made.id, "--json")
    assert json.loads(output)["metadata"] == {"customer": "7"}
    assert run_here("batch", "cancel", made.id)[:2] == (0, "cancelling\n")
    code, output, _ = run_here("batch", "cancel", made.id, "--json")
    assert json.loads(output)["status"] == "cancelling"


@pytest.mark.parametrize("command", ["status", "cancel"])
def test_an_unknown_batch_is_said_to_be_none(run_here: RunHere, command: str) -> None:
    code, output, errors = run_here("batch", command, "batch_nowhere")
    assert (code, output) == (1, "")
    assert errors == "inferq: there is no batch 'batch_nowhere'\n"
