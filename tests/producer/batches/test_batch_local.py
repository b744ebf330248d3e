"""Batches from file to file, without a gateway."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferq.producer import AsyncClient
from inferq.producer.batches.answering import RETENTION_S
from inferq.producer.batches.local import LocalBatch, LocalResult, run_local_batch
from inferq.producer.batches.models import QueueClients
from inferq.producer.batches.records import Counts, Terms
from inferq.producer.batches.surveys import SurveyFailed
from inferq.protocol.errors import InvalidRequestError, ServerLost

#: Generous: the machine may be busy.
TIMEOUT_S = 90


@pytest.fixture
def batch(tmp_path: Path, queue: str, line_of: Any) -> LocalBatch:
    """Thirty lines and a bad one."""
    path = tmp_path / "in put.jsonl"
    rows = [json.dumps(line_of(f"line-{k}")) for k in range(30)]
    path.write_text("\n".join([*rows, "{bad"]))
    return LocalBatch(
        input=path,
        output=tmp_path / "out.jsonl",
        errors=tmp_path / "errors.jsonl",
        terms=Terms(queues=(queue,)),
    )


@pytest.fixture
async def clients(valkey_url: str) -> AsyncIterator[QueueClients]:
    made = QueueClients(lambda name: AsyncClient(valkey_url, name, retention_s=RETENTION_S))
    yield made
    await made.aclose()


async def run(
    batch: LocalBatch,
    clients: QueueClients,
    stop: asyncio.Event | None = None,
    shown: list[Counts] | None = None,
) -> LocalResult:
    shown = [] if shown is None else shown
    async with asyncio.timeout(TIMEOUT_S):
        return await run_local_batch(
            batch, clients, stop=stop or asyncio.Event(), on_progress=shown.append
        )


def ids_of(path: Path) -> list[str]:
    return sorted(str(json.loads(line)["custom_id"]) for line in path.read_text().splitlines())


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


ALL = sorted(f"line-{k}" for k in range(30))


async def test_lines_that_failed_go_to_a_file_of_their_own(
    batch: LocalBatch, clients: QueueClients, start_stand_in: Any
) -> None:
    start_stand_in().say("Hello there")
    shown: list[Counts] = []
    result = await run(batch, clients, shown=shown)
    assert result.is_complete
    assert result.resumed == 0
    assert (result.counts.total, result.counts.completed, result.counts.failed) == (31, 30, 1)
    assert shown[0] == Counts(total=31)
    assert shown[-1] == result.counts
    assert ids_of(batch.output) == ALL
    assert batch.errors is not None
    assert ids_of(batch.errors) == ["None"]
    assert not batch.folder.exists()


async def test_or_to_the_same(
    batch: LocalBatch, clients: QueueClients, start_stand_in: Any
) -> None:
    start_stand_in().say("Hello there")
    await run(replace(batch, errors=None), clients)
    assert ids_of(batch.output) == sorted([*ALL, "None"])


async def test_a_run_that_was_stopped_goes_on_where_it_was(
    batch: LocalBatch, clients: QueueClients, start_stand_in: Any
) -> None:
    worker = start_stand_in(step_s=0.02)
    worker.say("Hello there")
    batch = replace(batch, window=4)
    stop = asyncio.Event()
    running = asyncio.create_task(run(batch, clients, stop))
    give_up = time.monotonic() + TIMEOUT_S
    while len(worker.engine.requests) < 9:
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)
    with pytest.raises(InvalidRequestError, match="another run"):
        await run(batch, clients)
    stop.set()
    first = await running
    assert not first.is_complete
    assert not batch.output.exists()
    second = await run(batch, clients)
    assert second.is_complete
    assert second.resumed == first.counts.ended > 0
    assert ids_of(batch.output) == ALL
    assert len(worker.engine.requests) == 30


async def test_files_that_are_not_as_they_were_are_refused(
    batch: LocalBatch, clients: QueueClients
) -> None:
    stop = asyncio.Event()
    stop.set()
    assert not (await run(batch, clients, stop)).is_complete
    with pytest.raises(InvalidRequestError, match="another queue or model"):
        await run(replace(batch, terms=replace(batch.terms, default_model="m")), clients, stop)
    whole = batch.input.read_bytes()
    batch.input.write_bytes(whole + b"\n")
    with pytest.raises(InvalidRequestError, match="has changed"):
        await run(batch, clients, stop)
    batch.input.write_bytes(whole)
    (batch.folder / "state.json").write_text("{}")
    with pytest.raises(InvalidRequestError, match="begin anew"):
        await run(batch, clients, stop)


async def test_files_that_are_there_are_not_overwritten(
    batch: LocalBatch, clients: QueueClients
) -> None:
    assert batch.errors is not None
    batch.errors.write_text("kept")
    with pytest.raises(InvalidRequestError, match=r"errors\.jsonl exists"):
        await run(batch, clients)
    assert batch.errors.read_text() == "kept"
    assert not batch.folder.exists()


async def test_what_cannot_be_read_or_written_is_said(
    batch: LocalBatch, clients: QueueClients, tmp_path: Path
) -> None:
    for wrong, field in (
        (replace(batch, input=tmp_path / "none"), "input"),
        (replace(batch, input=tmp_path), "input"),
        (replace(batch, output=tmp_path / "none" / "out"), "output"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            await run(wrong, clients)
        assert caught.value.field == field
    batch.input.write_text("\n")
    with pytest.raises(SurveyFailed) as failed:
        await run(batch, clients)
    assert failed.value.fault.code == "empty_file"
    assert names_in(tmp_path) == [batch.input.name]


async def test_a_server_that_is_away_at_first_is_said_and_nothing_stays(batch: LocalBatch) -> None:
    clients = QueueClients(lambda name: AsyncClient("redis://127.0.0.1:1", name, timeout_s=0.5))
    with pytest.raises(ServerLost):
        await run(batch, clients)
    assert not batch.folder.exists()
    batch.input.write_bytes(batch.input.read_bytes() + b"\n")
    with pytest.raises(ServerLost):
        await run(batch, clients)
    await clients.aclose()


async def test_a_model_that_lines_do_not_name_can_be_given(
    batch: LocalBatch, clients: QueueClients, start_stand_in: Any, line_of: Any
) -> None:
    start_stand_in().say("Hello there")
    rows = [line_of("without"), line_of("with")]
    del rows[0]["body"]["model"]
    batch.input.write_text("\n".join(map(json.dumps, rows)))
    terms = replace(batch.terms, default_model="stand-in")
    result = await run(replace(batch, terms=terms), clients)
    assert result.counts.completed == 2
