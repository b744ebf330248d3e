"""The commands of operators: queue, workers, drain, dead."""

from __future__ import annotations

import argparse
import asyncio
import sys
from datetime import UTC, datetime
from typing import Final

from inferq.cli.flags import Commands, add_command, place_of, run_on_server
from inferq.cli.printing import print_json, print_table
from inferq.producer import QueueAdmin, WorkerInfo
from inferq.protocol.errors import DecodeError
from inferq.protocol.messages import Job
from inferq.protocol.replies import DeadLetter, QueueOverview

_QUEUE_EXAMPLES: Final = """\
Prints how many jobs wait in each lane and for how long the first has, how many run, the tokens of
all jobs that have not ended, dead letters, and workers alive.

Examples:
  inferq queue
  inferq queue --json --queue llama
"""

_WORKERS_EXAMPLES: Final = """\
Example:
  inferq workers
"""

_DRAIN_EXAMPLES: Final = """\
The worker takes no more jobs, finishes what it can within its drain time-out, hands the rest over
at the offset it has published, and ends. It learns of the wish at its next report.

Example:
  inferq drain pod-7
"""

_DEAD_EXAMPLES: Final = """\
A dead letter is a job whose workers died, or an entry that is no job. `inferq dead list` shows the
ids that the other commands take.

Examples:
  inferq dead list
  inferq dead show 1764400000000-0
  inferq dead redrive 1764400000000-0
  inferq dead redrive --all
  inferq dead drop 1764400000000-0
"""


def add_commands(commands: Commands) -> None:
    """Add them to the parser's commands."""
    overview = add_command(commands, "queue", "say what a queue holds", _QUEUE_EXAMPLES)
    run_on_server(overview, _admin, _queue)
    workers = add_command(commands, "workers", "list the workers of a queue", _WORKERS_EXAMPLES)
    run_on_server(workers, _admin, _workers)
    drain = add_command(commands, "drain", "ask a worker to drain and end", _DRAIN_EXAMPLES)
    drain.add_argument("worker", metavar="WORKER", help="its name, as `inferq workers` lists it")
    run_on_server(drain, _admin, _drain)
    dead = commands.add_parser(
        "dead", help="deal with jobs that no worker could serve", allow_abbrev=False
    )
    inner = dead.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = add_command(inner, "list", "list the dead letters", _DEAD_EXAMPLES)
    _add_partition(listing)
    run_on_server(listing, _admin, _dead_list)
    for name, summary, run in (
        ("show", "show one dead letter, with its job", _dead_show),
        ("redrive", "submit a job of the dead letters anew", _dead_redrive),
        ("drop", "remove a dead letter for good", _dead_drop),
    ):
        command = add_command(inner, name, summary, _DEAD_EXAMPLES)
        many = name != "show"
        which = command.add_mutually_exclusive_group(required=True) if many else command
        which.add_argument("entry_id", metavar="ID", nargs="?" if many else None, help="its id")
        if many:
            which.add_argument("--all", action="store_true", help="all that can be")
        _add_partition(command)
        run_on_server(command, _admin, run)


def _add_partition(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--partition", type=int, default=0, metavar="P", help="partition (default: %(default)s)"
    )


def _admin(arguments: argparse.Namespace) -> QueueAdmin:
    place = place_of(arguments)
    return QueueAdmin(place.redis_url, place.queue, partitions=place.partitions)


async def _queue(admin: QueueAdmin, arguments: argparse.Namespace) -> None:
    overview, workers = await asyncio.gather(admin.overview(), admin.workers())
    alive = sum(worker.is_alive for worker in workers)
    if arguments.json:
        print_json(
            {
                "queue": admin.queue,
                "partitions": admin.num_partitions,
                "lanes": overview.lanes,
                "load": overview.load,
                "left_behind": overview.left_behind,
                "dead_letters": overview.dead_letters,
                "workers_alive": alive,
            }
        )
        return
    _print_overview(admin, overview, alive)


def _print_overview(admin: QueueAdmin, overview: QueueOverview, alive: int) -> None:
    load = overview.load
    rows: list[tuple[object, ...]] = [("LANE", "WAITING", "TAKEN", "OLDEST")]
    rows += [
        (lane.value, each.waiting, each.taken, _seconds(each.oldest_ms))
        for lane, each in overview.lanes.items()
    ]
    print_table(rows)
    print(f"jobs: {load.queued} queued, {load.running} running, {load.delayed} delayed")
    if overview.left_behind:
        print(f"left behind by their workers: {overview.left_behind}")
    print(f"tokens outstanding: {load.prompt_tokens} of prompts, {load.budget_tokens} to generate")
    print(f"dead letters: {overview.dead_letters}")
    partitions = f", {admin.num_partitions} partitions" if admin.num_partitions > 1 else ""
    print(f"workers alive: {alive} (queue {admin.queue}{partitions})")


async def _workers(admin: QueueAdmin, arguments: argparse.Namespace) -> None:
    workers = await admin.workers()
    if arguments.json:
        for worker in workers:
            print_json(worker)
        return
    rows: list[tuple[object, ...]] = [
        ("WORKER", "PARTITION", "STATE", "SEEN", "MODEL", "RUNNING", "WAITING", "FREE", "VERSION")
    ]
    print_table(rows + [_worker_row(worker) for worker in workers])


def _worker_row(worker: WorkerInfo) -> tuple[object, ...]:
    return (
        worker.name,
        worker.partition,
        worker.state,
        f"{worker.age_s:.0f} s ago",
        worker.model,
        worker.running,
        worker.waiting,
        f"{worker.free_blocks}/{worker.total_blocks}",
        worker.version,
    )


async def _drain(admin: QueueAdmin, arguments: argparse.Namespace) -> None:
    await admin.drain(arguments.worker)
    if arguments.json:
        print_json({"worker": arguments.worker, "asked": True})
    else:
        print(f"asked {arguments.worker} to drain")


async def _dead_list(admin: QueueAdmin, arguments: argparse.Namespace) -> None:
    letters = await admin.dead_letters(arguments.partition)
    if arguments.json:
        for letter in letters:
            print_json(_summary(letter))
        return
    rows: list[tuple[object, ...]] = [("ID", "KIND", "JOB", "LANE", "CRASHES", "TIME", "REASON")]
    for letter in letters:
        shown = _summary(letter)
        rows.append(
            tuple(shown[k] for k in ("id", "kind", "job", "lane", "crashes", "time", "reason"))
        )
    print_table(rows)


async def _dead_show(admin: QueueAdmin, arguments: argparse.Namespace) -> None:
    letter = await admin.dead_letter(arguments.entry_id, arguments.partition)
    shown = _summary(letter)
    try:
        job = Job.decode(letter.payload)
    except DecodeError as error:
        shown["undecodable"] = str(error)
        shown["payload"] = letter.payload[:256].hex()
        shown["payload_bytes"] = len(letter.payload)
    else:
        shown |= {"prompt": job.prompt, "params": job.params, "metadata": job.metadata}
    print_json(shown)


async def _dead_redrive(admin: QueueAdmin, arguments: argparse.Namespace) -> None:
    chosen, left = await _chosen(admin, arguments, only_crashed=True)
    for entry_id in chosen:
        job_id = await admin.redrive(entry_id, arguments.partition)
        if arguments.json:
            print_json({"id": entry_id, "job_id": job_id})
        else:
            print(job_id)
    if left:
        print(
            f"{left} undecodable {'letter is' if left == 1 else 'letters are'} left, to be looked "
            "at (inferq dead show ID) or dropped (inferq dead drop ID)",
            file=sys.stderr,
        )
    _say_if_none(chosen, left, "redriven")


async def _dead_drop(admin: QueueAdmin, arguments: argparse.Namespace) -> None:
    chosen, left = await _chosen(admin, arguments, only_crashed=False)
    for entry_id in chosen:
        await admin.drop(entry_id, arguments.partition)
        if arguments.json:
            print_json({"id": entry_id, "dropped": True})
        else:
            print(f"dropped {entry_id}")
    _say_if_none(chosen, left, "dropped")


async def _chosen(
    admin: QueueAdmin, arguments: argparse.Namespace, *, only_crashed: bool
) -> tuple[list[str], int]:
    """Return the entries that were asked for, and how many of all cannot be taken."""
    if not arguments.all:
        letter = await admin.dead_letter(arguments.entry_id, arguments.partition)
        return [letter.entry_id], 0
    letters = await admin.dead_letters(arguments.partition)
    chosen = [each.entry_id for each in letters if each.can_be_redriven or not only_crashed]
    return chosen, len(letters) - len(chosen)


def _say_if_none(chosen: list[str], left: int, done: str) -> None:
    if not chosen and not left:
        print(f"there are no dead letters: none was {done}", file=sys.stderr)


def _summary(letter: DeadLetter) -> dict[str, object]:
    return {
        "id": letter.entry_id,
        "kind": letter.kind.value,
        "job": letter.job_id,
        "lane": letter.lane.value,
        "crashes": letter.crashes,
        "time": datetime.fromtimestamp(letter.time_ms / 1000, UTC).isoformat(timespec="seconds"),
        "reason": letter.reason,
    }


def _seconds(milliseconds: int | None) -> str | None:
    return None if milliseconds is None else f"{milliseconds / 1000:.1f} s"
