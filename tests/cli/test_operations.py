"""What operators do from the command line: look, drain, deal with dead letters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import redis.asyncio

from inferq.producer import AsyncClient, QueueAdmin
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import QueueKeys
from inferq.protocol.params import SamplingParams
from inferq.protocol.scripts import QueueScripts

RunHere = Callable[..., tuple[int, str, str]]
CLAIM: dict[str, Any] = {
    "free_tokens": 10**6,
    "idle": True,
    "max_jobs": 1,
    "max_model_len": 1000,
    "block_size": 16,
    "lease_ms": 60_000,
    "max_crashes": 2,
    "retention_ms": 60_000,
}


async def _crash(scripts: QueueScripts, client: AsyncClient) -> str:
    """Submit a job whose workers die; its dead letter stays."""
    job = await client.submit("poison", SamplingParams(max_tokens=4), metadata={"who": "me"})
    async with asyncio.timeout(10):
        while not await scripts.dead_letters():
            await scripts.claim("w", **CLAIM)
            await scripts.reconcile("w", [], crashed=True)
    return job.id


def test_a_queue_says_what_waits_and_what_is_outstanding(
    run_here: RunHere, on_queue: Callable[..., Any]
) -> None:
    async def fill(scripts: QueueScripts, client: AsyncClient) -> None:
        for lane in ("high", "normal", "normal"):
            await client.submit([1, 2, 3], SamplingParams(max_tokens=5), lane=lane)
        await scripts.register("w", {"model": "m"})

    on_queue(fill)
    code, output, _ = run_here("queue")
    assert code == 0
    lines = [line.split() for line in output.splitlines()]
    assert lines[0] == ["LANE", "WAITING", "TAKEN", "OLDEST"]
    assert lines[1][:3] == ["high", "1", "0"]
    assert lines[2][:3] == ["normal", "2", "0"]
    assert lines[3] == ["low", "0", "0", "-"]
    assert "jobs: 3 queued, 0 running, 0 delayed" in output
    assert "tokens outstanding: 9 of prompts, 15 to generate" in output
    assert "workers alive: 1" in output
    code, output, _ = run_here("queue", "--json")
    shown = json.loads(output)
    assert shown["lanes"]["normal"]["waiting"] == 2
    assert shown["load"]["budget_tokens"] == 15


def test_workers_are_listed(run_here: RunHere, on_queue: Callable[..., Any]) -> None:
    on_queue(lambda s, _: s.register("pod-1", {"model": "smol", "blocks": 64, "free": 60}))
    code, output, _ = run_here("workers")
    assert code == 0
    row = output.splitlines()[1]
    assert row.split()[:3] == ["pod-1", "0", "serving"]
    assert "60/64" in row
    code, output, _ = run_here("workers", "--json")
    assert json.loads(output)["name"] == "pod-1"


def test_drain_asks_a_worker_that_is_there_and_refuses_others(
    run_here: RunHere, on_queue: Callable[..., Any]
) -> None:
    on_queue(lambda s, _: s.register("pod-1", {}))
    code, output, _ = run_here("drain", "pod-1")
    assert (code, output) == (0, "asked pod-1 to drain\n")
    assert on_queue(lambda s, _: s.register("pod-1", {})).drain
    code, _, errors = run_here("drain", "pod-2")
    assert code == 2
    assert "has no worker 'pod-2'" in errors


def test_a_dead_letter_is_listed_shown_and_redriven(
    run_here: RunHere, on_queue: Callable[..., Any]
) -> None:
    job_id = on_queue(_crash)
    code, output, _ = run_here("dead", "list", "--json")
    letter = json.loads(output)
    assert (letter["kind"], letter["job"], letter["crashes"]) == ("crashed", job_id, 2)
    code, output, _ = run_here("dead", "show", letter["id"])
    shown = json.loads(output)
    assert shown["prompt"]["text"] == "poison"
    assert shown["metadata"] == {"who": "me"}
    code, output, _ = run_here("dead", "redrive", letter["id"])
    assert code == 0
    status = on_queue(lambda _, client: client.job(output.strip()).status())
    assert (status.state, status.crashes) == ("queued", 0)
    code, _, errors = run_here("dead", "redrive", letter["id"])
    assert code == 2
    assert "no dead letter" in errors


def test_redriving_all_says_what_it_leaves(run_here: RunHere, on_queue: Callable[..., Any]) -> None:
    code, output, errors = run_here("dead", "redrive", "--all")
    assert (code, output) == (0, "")
    assert "there are no dead letters" in errors

    async def add_letters(scripts: Any, client: Any) -> None:
        await _crash(scripts, client)
        await client.submit("x", SamplingParams(max_tokens=4))
        [job] = (await scripts.claim("w", **CLAIM)).claimed
        assert await scripts.reject(
            "w", job.job_id, job.epoch, code="undecodable", message="no job", retention_ms=60_000
        )

    on_queue(add_letters)
    code, output, errors = run_here("dead", "redrive", "--all")
    assert (code, len(output.splitlines())) == (0, 1)
    assert "1 undecodable letter is left" in errors
    code, output, errors = run_here("dead", "redrive", "--all")
    assert (code, output) == (0, "")
    assert "1 undecodable letter is left" in errors


def test_dropping_all_leaves_no_dead_letter(
    run_here: RunHere, on_queue: Callable[..., Any]
) -> None:
    on_queue(_crash)
    code, output, _ = run_here("dead", "drop", "--all")
    assert code == 0
    assert output.startswith("dropped ")
    code, output, _ = run_here("dead", "list")
    assert output.splitlines()[1:] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("dead", "show", "x"), "entry_id"),
        (("dead", "show", "1-1"), "no dead letter 1-1"),
        (("dead", "drop"), "ID --all is required"),
        (("dead", "list", "--partition", "3"), "partition: 3 is not in [0, 1)"),
        (("queue", "--partitions", "0"), "partitions: must be a whole number in [1, 1024]"),
        (("drain",), "WORKER"),
    ],
)
def test_bad_arguments_of_operators_are_refused(
    run_here: RunHere, arguments: tuple[str, ...], said: str
) -> None:
    code, _, errors = run_here(*arguments)
    assert code == 2
    assert said in errors


async def test_a_redrive_that_is_repeated_makes_one_job(
    valkey_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        redis.asyncio.Redis.from_url(valkey_url) as connection,
        AsyncClient(valkey_url, queue) as client,
        QueueAdmin(valkey_url, queue) as admin,
    ):
        scripts = QueueScripts(connection, QueueKeys(queue))
        await _crash(scripts, client)
        [letter] = await admin.dead_letters()
        real, calls = QueueScripts.redrive, []

        async def reply_is_lost(self: QueueScripts, entry_id: str, *, job_id: str) -> str:
            calls.append(job_id)
            new_id = await real(self, entry_id, job_id=job_id)
            if len(calls) == 1:
                raise redis.ConnectionError("the reply was lost")
            return new_id

        monkeypatch.setattr(QueueScripts, "redrive", reply_is_lost)
        new_id = await admin.redrive(letter.entry_id)
        assert calls == [new_id, new_id]
        assert (await scripts.load()).queued == 1
        with pytest.raises(InvalidRequestError, match="no dead letter"):
            await admin.redrive(letter.entry_id)
