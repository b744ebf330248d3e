"""What several commands of `inferq` have in common: their form, and the flags they share."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from inferq.cli import exit_codes
from inferq.cli.exit_codes import HELP as EXIT_CODES
from inferq.producer.partitions import to_num_partitions
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import DEFAULT_QUEUE, QueueKeys
from inferq.protocol.servers import DEFAULT_URL, ServerUrl
from inferq.runtime.variables import ENV_PREFIX, check_variables

T = TypeVar("T")

#: Largest value of flags that count.
MAX_WHOLE_NUMBER: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a queue is, as flags and variables say."""

    redis_url: str = field(repr=False)
    queue: str
    partitions: int

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Place:
        """Read the flags of `add_server_flags`, else the variables, else the defaults.

        An empty one is not taken for one that was left out: what was meant would be done elsewhere.
        Raises `InvalidRequestError` that names the flag or the variable.
        """
        name, redis_url = _chosen(arguments.redis_url, "--redis-url", "REDIS_URL", DEFAULT_URL)
        with _named(name):
            ServerUrl.parse(redis_url)
        name, queue = _chosen(arguments.queue, "--queue", "QUEUE", DEFAULT_QUEUE)
        with _named(name):
            QueueKeys(queue)
        return cls(redis_url, queue, to_num_partitions(arguments.partitions))


def place_of(arguments: argparse.Namespace) -> Place:
    """Return `Place.of` the flags; raise `InvalidRequestError` for a misspelt variable too."""
    check_variables(os.environ)
    return Place.of(arguments)


def _chosen(given: str | None, flag: str, variable: str, default: str) -> tuple[str, str]:
    """Return what names a value, and the value."""
    if given is not None:
        return flag, given
    variable = f"{ENV_PREFIX}{variable}"
    return variable, os.environ.get(variable, default)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Let an error name the flag or variable that holds the value."""
    try:
        yield
    except InvalidRequestError as error:
        raise error.of_field(name) from None


class Commands(Protocol):
    """What `add_subparsers` returns, whose own type is private to argparse."""

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser:
        """Add one command."""


def add_command(
    commands: Commands, name: str, summary: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command with its one-line summary, examples, and the meaning of its exit codes."""
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"{examples}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON objects, one a line")


def whole_number(text: str) -> int:
    """Return what an argument from 1 to `MAX_WHOLE_NUMBER` says; for `type` of a flag."""
    fits = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_WHOLE_NUMBER))
    value = int(text) if fits else 0
    if not 1 <= value <= MAX_WHOLE_NUMBER:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number in [1, {MAX_WHOLE_NUMBER}]"
        )
    return value


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which server and which queue."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--redis-url",
        metavar="URL",
        help="redis://[user:password@]host[:port][/database], or rediss:// for TLS "
        f"(default: $INFERQ_REDIS_URL, else {DEFAULT_URL})",
    )
    group.add_argument(
        "--queue",
        metavar="NAME",
        help=f"queue of the model (default: $INFERQ_QUEUE, else {DEFAULT_QUEUE})",
    )
    group.add_argument(
        "--partitions",
        type=int,
        metavar="N",
        help="into how many partitions the queue is split (default: $INFERQ_PARTITIONS, else 1)",
    )


def run_on_server(
    parser: argparse.ArgumentParser,
    connect: Callable[[argparse.Namespace], AbstractAsyncContextManager[T]],
    run: Callable[[T, argparse.Namespace], Awaitable[None]],
) -> None:
    """Let a command run with what `connect` makes of its flags; add the flags that it needs."""

    async def run_connected(arguments: argparse.Namespace) -> None:
        async with connect(arguments) as connected:
            await run(connected, arguments)

    def run_command(arguments: argparse.Namespace) -> int:
        asyncio.run(run_connected(arguments))
        return exit_codes.OK

    add_json_flag(parser)
    add_server_flags(parser)
    parser.set_defaults(run=run_command)
