"""What `inferq batch` does."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final, TypeVar

from inferq.cli import exit_codes
from inferq.cli.flags import place_of
from inferq.cli.printing import print_fields, print_json, print_table
from inferq.producer.async_client import AsyncClient
from inferq.producer.batches.records import BatchRecord
from inferq.producer.batches.store import BatchStore
from inferq.producer.gateway.answers.batch_objects import batch_object
from inferq.protocol.errors import InvalidRequestError

R = TypeVar("R")

_TIMES: Final = (
    *("created_at", "in_progress_at", "finalizing_at", "completed_at", "failed_at"),
    *("expired_at", "cancelling_at", "cancelled_at", "expires_at"),
)


def list_batches(arguments: argparse.Namespace) -> int:
    """List the batches of one API key, or of none."""
    if arguments.key == "":
        raise InvalidRequestError(
            "is empty: for the batches of no key, leave it out", field="--key"
        )
    page = _with_store(arguments, lambda store: store.batches(arguments.key, limit=arguments.count))
    if arguments.json:
        for record in page.records:
            print_json(batch_object(record))
        return exit_codes.OK
    rows: list[tuple[object, ...]] = [
        ("ID", "STATUS", "LINES", "DONE", "FAILED", "MODEL", "CREATED", "EXPIRES")
    ]
    for each in page.records:
        counts = each.counts
        row = (each.id, each.status.value, counts.total, counts.completed, counts.failed)
        rows.append((*row, each.model, _time(each.created_at), _time(each.expires_at)))
    print_table(rows)
    return exit_codes.OK


def status_batch(arguments: argparse.Namespace) -> int:
    """Say where a batch stands."""
    record = _with_store(arguments, lambda store: store.batch(arguments.batch_id))
    if record is None:
        return _unknown(arguments)
    if arguments.json:
        print_json(batch_object(record))
    else:
        _print(record)
    return exit_codes.OK


def cancel_batch(arguments: argparse.Namespace) -> int:
    """Ask for the end of a batch."""
    record = _with_store(arguments, lambda store: store.request_cancel(arguments.batch_id))
    if record is None:
        return _unknown(arguments)
    if arguments.json:
        print_json(batch_object(record))
    else:
        print(record.status.value)
    return exit_codes.OK


def _with_store(
    arguments: argparse.Namespace, operation: Callable[[BatchStore], Awaitable[R]]
) -> R:
    place = place_of(arguments)

    async def run() -> R:
        async with AsyncClient(place.redis_url, place.queue, partitions=place.partitions) as client:
            return await operation(BatchStore(client))

    return asyncio.run(run())


def _unknown(arguments: argparse.Namespace) -> int:
    print(f"inferq: there is no batch {arguments.batch_id!r}", file=sys.stderr)
    return exit_codes.FAILED


def _print(record: BatchRecord) -> None:
    shown = batch_object(record)
    counts, usage, errors = (shown.pop(name) for name in ("request_counts", "usage", "errors"))
    shown |= {name: _time(shown[name]) for name in _TIMES if shown[name] is not None}
    shown["lines"] = "{total} in all, {completed} done, {failed} failed".format(**counts)
    shown["tokens"] = "{input_tokens} in, {output_tokens} out".format(**usage)
    print_fields({name: value for name, value in shown.items() if name != "object"})
    for each in [] if errors is None else errors["data"]:
        line = "" if each["line"] is None else f"line {each['line']}: "
        print(f"error: {line}{each['message']} [{each['code']}]")


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
