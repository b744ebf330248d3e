"""`inferq batch run`: the requests of a file answered through the queue, into another file."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from inferq.cli import exit_codes
from inferq.cli.batch_progress import shown_progress
from inferq.cli.flags import Place, place_of
from inferq.cli.printing import print_json
from inferq.producer.async_client import AsyncClient
from inferq.producer.batches.answering import RETENTION_S
from inferq.producer.batches.local import LocalResult, run_local_batch
from inferq.producer.batches.local_state import LocalBatch
from inferq.producer.batches.models import QueueClients
from inferq.producer.batches.records import Terms
from inferq.producer.batches.surveys import SurveyFailed
from inferq.protocol.errors import InferqError, InvalidRequestError
from inferq.protocol.task_ends import end_tasks
from inferq.runtime.logs import configure_logging

#: Seconds of waiting after which we look for workers.
LOOK_AFTER_S: Final = 2.0


def run_batch(arguments: argparse.Namespace) -> int:
    """Answer the requests of a file, or go on with that; return the exit code.

    Raises `InvalidRequestError` for files that are not as they must be.
    """
    place = place_of(arguments)
    batch = _batch(arguments, place.queue)
    began = time.monotonic()
    try:
        result = asyncio.run(_run(batch, place))
    except SurveyFailed as error:
        fault = error.fault
        line = "" if fault.line is None else f", line {fault.line}"
        raise InvalidRequestError(f"{batch.input}{line}: {fault.message}", field="input") from None
    _print(batch, result, time.monotonic() - began, as_json=arguments.json)
    if not result.is_complete:
        return exit_codes.INTERRUPTED
    return exit_codes.FAILED if result.counts.failed else exit_codes.OK


def _batch(arguments: argparse.Namespace, queue: str) -> LocalBatch:
    output = Path(arguments.output)
    errors = None if arguments.errors is None else Path(arguments.errors)
    return LocalBatch(
        input=Path(arguments.input),
        output=output,
        errors=errors,
        terms=Terms(
            queues=(queue,), default_model=arguments.model, tool_format=arguments.tool_format
        ),
        window=arguments.window,
    )


async def _run(batch: LocalBatch, place: Place) -> LocalResult:
    stop = asyncio.Event()
    _stop_on_signals(stop)
    clients = QueueClients(
        lambda queue: AsyncClient(
            place.redis_url, queue, partitions=place.partitions, retention_s=RETENTION_S
        )
    )
    try:
        with shown_progress() as show:
            configure_logging("warning", "auto")  # a bar lets lines through above it from here on
            async with _watch_for_workers(clients.of(batch.terms.queues[0])):
                return await run_local_batch(batch, clients, stop=stop, on_progress=show)
    finally:
        await clients.aclose()


def _stop_on_signals(stop: asyncio.Event) -> None:
    """Let the first signal stop in order, a second one at once: nothing that is kept is lost."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        for signum in signals:
            loop.remove_signal_handler(signum)

    signals = (signal.SIGINT, signal.SIGTERM)
    for signum in signals:
        loop.add_signal_handler(signum, on_signal)


@contextlib.asynccontextmanager
async def _watch_for_workers(client: AsyncClient) -> AsyncIterator[None]:
    """Say it on standard error, once, if nobody serves the queue."""

    async def look() -> None:
        await asyncio.sleep(LOOK_AFTER_S)
        with contextlib.suppress(InferqError):  # whoever runs the batch finds out, and waits
            if not any(worker.is_alive for worker in await client.workers()):
                print(f"inferq: no worker serves queue {client.queue!r}; waiting", file=sys.stderr)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        await end_tasks([looking])


def _print(batch: LocalBatch, result: LocalResult, seconds: float, *, as_json: bool) -> None:
    counts = result.counts
    errors = batch.errors or batch.output
    if as_json:
        shown: dict[str, Any] = {
            "complete": result.is_complete,
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.failed,
            "resumed": result.resumed,
            "prompt_tokens": counts.prompt_tokens,
            "cached_tokens": counts.cached_tokens,
            "completion_tokens": counts.completion_tokens,
            "seconds": round(seconds, 3),
            "output": str(batch.output),
            "errors": str(errors),
        }
        print_json(shown)
        return
    before = f", {result.resumed} of them before" if result.resumed else ""
    tokens = f"{counts.prompt_tokens} tokens in, {counts.completion_tokens} out"
    if not result.is_complete:
        print(
            f"inferq: interrupted with {counts.ended} of {counts.total} lines done; "
            "the same command goes on",
            file=sys.stderr,
        )
        return
    print(f"{counts.completed} of {counts.total} lines answered{before}, {tokens}: {batch.output}")
    if counts.failed:
        print(f"{counts.failed} lines failed: {errors}")
