"""`inferq webhooks`: what became of deliveries, dead ones driven again, and a secret to sign."""

from __future__ import annotations

import argparse
import base64
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

from inferq.cli import exit_codes
from inferq.cli.flags import Commands, add_command, place_of, run_on_server, whole_number
from inferq.cli.printing import print_json, print_table
from inferq.producer.async_client import DEFAULT_TIMEOUT_S
from inferq.producer.partitions import Partitions
from inferq.producer.tasks.deliveries import DeliveryStore
from inferq.producer.tasks.signing import MAX_SECRET_BYTES, PREFIX
from inferq.protocol.keys import TaskKeys

_EXAMPLES: Final = """\
`inferq tasks` gives a delivery up when all its tries have failed, or when the receiver answers 410.

Examples:
  inferq webhooks list
  inferq webhooks log --count 20
  inferq webhooks redrive msg_0193…-0
  inferq webhooks redrive --all
"""

_NEW_EXAMPLES: Final = """\
The receiver checks signatures with it; `inferq tasks --webhook-secrets-file FILE` signs with it,
under a name, in a JSON map such as {"default": "whsec_…"}. It is shown here and kept nowhere.

Example:
  inferq webhooks secret
"""


def add_commands(commands: Commands) -> None:
    """Add them to the parser's commands."""
    parser = commands.add_parser(
        "webhooks", help="look at webhook deliveries, drive dead ones again", allow_abbrev=False
    )
    inner = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = add_command(inner, "list", "list the deliveries that were given up", _EXAMPLES)
    run_on_server(listing, _store, _list)
    log = add_command(inner, "log", "list the last attempts, newest first", _EXAMPLES)
    log.add_argument(
        "--count",
        type=whole_number,
        default=100,
        metavar="N",
        help="most of them (default: %(default)s)",
    )
    run_on_server(log, _store, _log)
    redrive = add_command(inner, "redrive", "make dead deliveries again, same id", _EXAMPLES)
    which = redrive.add_mutually_exclusive_group(required=True)
    which.add_argument("delivery_id", metavar="ID", nargs="?", help="its id")
    which.add_argument("--all", action="store_true", help="all that are dead")
    run_on_server(redrive, _store, _redrive)
    secret = add_command(inner, "secret", "make a secret that signs", _NEW_EXAMPLES)
    secret.set_defaults(run=_secret)


@asynccontextmanager
async def _store(arguments: argparse.Namespace) -> AsyncIterator[DeliveryStore]:
    place = place_of(arguments)
    partitions = Partitions(
        place.redis_url, place.queue, place.partitions, timeout_s=DEFAULT_TIMEOUT_S
    )
    try:
        yield DeliveryStore(partitions.server_of(TaskKeys.PREFIX), partitions.queue)
    finally:
        await partitions.aclose()


async def _list(store: DeliveryStore, arguments: argparse.Namespace) -> None:
    rows: list[tuple[object, ...]] = [("ID", "EVENT", "URL", "ATTEMPTS", "TIME", "REASON")]
    for each in await store.dead():
        if arguments.json:
            print_json(each)
        row = (each.delivery_id, each.event, each.url, each.attempts, _time(each.time_ms))
        rows.append((*row, each.reason))
    if not arguments.json:
        print_table(rows)


async def _log(store: DeliveryStore, arguments: argparse.Namespace) -> None:
    rows: list[tuple[object, ...]] = [
        ("TIME", "ID", "ATTEMPT", "OUTCOME", "STATUS", "MS", "HOST", "REASON")
    ]
    for each in await store.log(most=arguments.count):
        if arguments.json:
            print_json(each)
        row = (_time(each.time_ms), each.delivery_id, each.attempt, each.outcome)
        rows.append((*row, each.status or "-", each.took_ms, each.host, each.reason))
    if not arguments.json:
        print_table(rows)


async def _redrive(store: DeliveryStore, arguments: argparse.Namespace) -> None:
    chosen = [arguments.delivery_id]
    if arguments.all:
        chosen = [each.delivery_id for each in await store.dead()]
    for delivery_id in chosen:
        await store.redrive(delivery_id)
        if arguments.json:
            print_json({"id": delivery_id, "redriven": True})
        else:
            print(delivery_id)
    if not chosen:
        print("there are no dead deliveries: none was redriven", file=sys.stderr)


def _secret(_: argparse.Namespace) -> int:
    print(PREFIX + base64.b64encode(secrets.token_bytes(MAX_SECRET_BYTES // 2)).decode())
    return exit_codes.OK


def _time(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
