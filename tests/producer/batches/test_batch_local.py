"""Batches from file to file, without a gateway."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferq.producer import AsyncClient
from inferq.producer.batches.answering import RETENTION_S
from inferq.producer.batches.local import LocalResult, run_local_batch
from inferq.producer.batches.local_state import LocalBatch, LocalState
from inferq.producer.batches.models import QueueClients
from inferq.producer.batches.records import Counts, Terms
from inferq.producer.batches.storage import StorageError
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


class _KilledError(Exception):
    """Stands for the end of the process."""


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


async def begin(batch: LocalBatch, clients: QueueClients) -> None:
    """Leave a batch as a run leaves it that is stopped before anything is asked."""
    stop = asyncio.Event()
    stop.set()
    assert not (await run(batch, clients, stop)).is_complete


async def test_nor_those_that_came_while_a_batch_was_stopped(
    batch: LocalBatch, clients: QueueClients, tmp_path: Path
) -> None:
    await begin(replace(batch, errors=None), clients)
    precious = tmp_path / "precious.jsonl"
    precious.write_text("kept")
    with pytest.raises(InvalidRequestError, match="begun with no file of errors") as caught:
        await run(replace(batch, errors=precious), clients)
    assert caught.value.field == "errors"
    batch.output.write_text("kept too")
    with pytest.raises(InvalidRequestError, match=r"out\.jsonl exists"):
        await run(replace(batch, errors=None), clients)
    assert [precious.read_text(), batch.output.read_text()] == ["kept", "kept too"]


async def test_nor_those_that_came_while_it_ran_and_all_is_kept_for_another_try(
    batch: LocalBatch, clients: QueueClients, start_stand_in: Any
) -> None:
    worker = start_stand_in()
    worker.say("Hello there")
    others = [batch.output.with_name(f"{batch.output.name}.tmp"), batch.output]

    def come(counts: Counts) -> None:
        if counts.ended == counts.total:
            for path in others:
                path.write_text("kept")

    with pytest.raises(InvalidRequestError, match=r"out\.jsonl exists"):
        await run_local_batch(batch, clients, stop=asyncio.Event(), on_progress=come)
    assert [path.read_text() for path in others] == ["kept", "kept"]
    assert batch.errors is not None
    assert not batch.errors.exists()
    for path in others:
        path.unlink()
    assert (await run(batch, clients)).resumed == 31
    assert ids_of(batch.output) == ALL
    assert len(worker.engine.requests) == 30


@pytest.mark.parametrize("has_links", [True, False])
async def test_a_file_that_comes_at_the_last_moment_is_not_replaced(
    batch: LocalBatch, clients: QueueClients, start_stand_in: Any, has_links: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    start_stand_in().say("Hello there")
    link = os.link

    def link_late(source: Path, target: Path) -> None:
        if target == batch.output:
            target.write_text("kept")
        if not has_links:
            raise OSError(errno.EPERM, "Operation not permitted")
        link(source, target)

    monkeypatch.setattr(os, "link", link_late)
    with pytest.raises(InvalidRequestError, match=r"out\.jsonl exists"):
        await run(batch, clients)
    assert batch.output.read_text() == "kept"
    batch.output.unlink()
    monkeypatch.undo()
    assert (await run(batch, clients)).is_complete
    assert ids_of(batch.output) == ALL
    assert sorted(names_in(batch.output.parent)) == ["errors.jsonl", "in put.jsonl", "out.jsonl"]


@pytest.mark.parametrize("place", ["before the output", "after it"])
async def test_a_run_that_was_killed_between_its_files_ends_where_it_was(
    batch: LocalBatch, clients: QueueClients, start_stand_in: Any, place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    worker = start_stand_in()
    worker.say("Hello there")
    assert batch.errors is not None
    link = os.link

    def link_errors(source: Path, target: Path) -> None:
        if target == batch.output:
            raise _KilledError
        link(source, target)

    def die(_: LocalState) -> None:
        raise _KilledError

    with monkeypatch.context() as killed:
        if place == "after it":
            killed.setattr(LocalState, "forget", die)
        else:
            killed.setattr(os, "link", link_errors)
        with pytest.raises(_KilledError):
            await run(batch, clients)
    made = batch.errors.stat()
    assert (await run(batch, clients)).is_complete
    assert batch.errors.stat().st_ino == made.st_ino
    assert ids_of(batch.output) == ALL
    assert len(worker.engine.requests) == 30
    assert not batch.folder.exists()


async def test_errors_go_nowhere_where_they_would_be_lost(
    batch: LocalBatch, clients: QueueClients, tmp_path: Path
) -> None:
    (tmp_path / "sub").mkdir()
    for errors, message in (
        (tmp_path / "sub" / ".." / "out.jsonl", "is the output"),
        (batch.folder / "errors.jsonl", "is removed in the end"),
        (tmp_path / "none" / "errors.jsonl", "is no folder"),
    ):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await run(replace(batch, errors=errors), clients)
        assert caught.value.field == "errors"
    assert not batch.folder.exists()


async def test_a_full_disk_is_told_as_such(
    batch: LocalBatch, clients: QueueClients, start_stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_stand_in().say("Hello there")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="No space left"):
            await run(batch, clients)
    assert names_in(batch.input.parent) == [batch.input.name]
    result = await run(batch, clients)
    assert (result.is_complete, result.resumed) == (True, 0)


async def test_a_folder_that_cannot_be_removed_costs_nothing(
    batch: LocalBatch, clients: QueueClients, start_stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_stand_in().say("Hello there")

    def fail(_: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", fail)
    assert (await run(batch, clients)).is_complete
    assert ids_of(batch.output) == ALL


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
