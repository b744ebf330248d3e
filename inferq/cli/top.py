"""`inferq top`: what a queue holds and its workers do, again and again."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from inferq.cli import exit_codes
from inferq.cli.extras import load_extra
from inferq.cli.flags import Commands, add_command, add_json_flag, add_server_flags, place_of
from inferq.cli.printing import print_json
from inferq.producer import QueueAdmin, WorkerInfo
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.replies import QueueOverview

#: Bounds of the time between two looks, in seconds.
INTERVAL_RANGE_S: Final = (0.2, 3600.0)

_EXAMPLES: Final = """\
Shows the lanes, how long the oldest job has waited, tokens per second and the workers with their
KV blocks, until Ctrl-C. Tokens per second are those between each worker's last two reports. A
producer's rights on the server are enough.

Examples:
  inferq top
  inferq top --queue llama --interval 1
  inferq top --once
  inferq top --once --json | jq .tokens_per_second
"""


@dataclass(frozen=True, slots=True)
class Look:
    """A queue and its workers at one moment, in seconds since 1970 by the server's clock."""

    queue: str
    partitions: int
    overview: QueueOverview
    workers: list[WorkerInfo]

    @property
    def generated_rate(self) -> float:
        """Tokens per second that the workers generate."""
        return sum(worker.generated_rate for worker in self._reporting())

    @property
    def prompt_rate(self) -> float:
        """Tokens per second of prompts that the workers take in."""
        return sum(worker.prompt_rate for worker in self._reporting())

    @property
    def oldest_s(self) -> float | None:
        """How long the oldest job that no worker took has waited; None if there is none."""
        waits = [each.oldest_ms for each in self.overview.lanes.values()]
        return max((wait / 1000 for wait in waits if wait is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        at = datetime.fromtimestamp(self.overview.time_ms / 1000, UTC)
        return {
            "time": at.isoformat(timespec="milliseconds"),
            "queue": self.queue,
            "partitions": self.partitions,
            "lanes": self.overview.lanes,
            "oldest_s": self.oldest_s,
            "load": self.overview.load,
            "left_behind": self.overview.left_behind,
            "dead_letters": self.overview.dead_letters,
            "tokens_per_second": self.generated_rate,
            "prompt_tokens_per_second": self.prompt_rate,
            "workers": [{"state": worker.state, **asdict(worker)} for worker in self.workers],
        }

    def _reporting(self) -> list[WorkerInfo]:
        return [worker for worker in self.workers if worker.is_reporting]


async def look_at(admin: QueueAdmin) -> Look:
    """Return what there is now."""
    overview, workers = await asyncio.gather(admin.overview(), admin.workers())
    return Look(admin.queue, admin.num_partitions, overview, workers)


def add_commands(commands: Commands) -> None:
    """Add the command to the parser's."""
    top = add_command(commands, "top", "watch a queue and its workers", _EXAMPLES)
    top.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="between two looks (default: %(default)g)",
    )
    top.add_argument("--once", action="store_true", help="look once; also where no terminal is")
    add_json_flag(top)
    add_server_flags(top)
    top.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    low, high = INTERVAL_RANGE_S
    if not low <= arguments.interval <= high:
        raise InvalidRequestError(
            f"{arguments.interval:g} s is not in [{low:g}, {high:g}]",
            field="--interval",
            limit=f"[{low:g}, {high:g}]",
        )
    try:
        asyncio.run(_top(arguments))
    except KeyboardInterrupt:  # the way to end it
        if arguments.once:
            raise
    except asyncio.CancelledError:  # SIGTERM, or the terminal has gone
        pass
    return exit_codes.OK


async def _top(arguments: argparse.Namespace) -> None:
    # before anything is asked of the server: what is missing is said at once
    screen = None if arguments.json else load_extra("inferq.cli.top_screen", extra="cli")
    place = place_of(arguments)
    async with QueueAdmin(place.redis_url, place.queue, partitions=place.partitions) as admin:
        if screen is None:
            await _print_json(admin, arguments)
        elif arguments.once or not sys.stdout.isatty():
            screen.show_once(await look_at(admin))
        else:
            await screen.follow(lambda: look_at(admin), arguments.interval)


async def _print_json(admin: QueueAdmin, arguments: argparse.Namespace) -> None:
    while True:
        print_json((await look_at(admin)).as_json())
        if arguments.once:
            return
        await asyncio.sleep(arguments.interval)
