"""How `inferq top` looks; needs rich, from the extra `cli`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inferq.producer import WorkerInfo
from inferq.protocol.errors import ServerLost

if TYPE_CHECKING:
    from inferq.cli.top import Look

#: Columns where no terminal says how wide it is.
PLAIN_WIDTH: Final = 160
BAR_WIDTH: Final = 20
#: Columns from which there is room for all that is known of a worker.
WIDE: Final = 130

_NUMBERS: Final = frozenset(
    {"WAITING", "TAKEN", "OLDEST", "RUN", "WAIT", "SWAP", "USED", "CACHED", "TOKENS/S"}
)
_STATE_STYLES: Final = {"serving": "green", "draining": "yellow", "late": "red", "gone": "red"}


def show_once(look: Look) -> None:
    """Print one look."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(view(look, console.width))


async def follow(look: Callable[[], Awaitable[Look]], interval_s: float) -> None:
    """Look every `interval_s`, on a screen of its own that is gone at the end.

    The first look's errors are raised; later a server that is away is waited for.
    """
    seen = await look()
    task = asyncio.current_task()
    assert task is not None
    # what a shell sends at its end must not leave the terminal on the other screen
    for signum in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    console = Console(highlight=False)
    first = view(seen, console.width)
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.refresh()
            await asyncio.sleep(interval_s)
            try:
                seen = await look()
                live.update(view(seen, console.width))
            except ServerLost as error:
                if error.is_refusal:
                    raise
                live.update(view(seen, console.width, problem=str(error)))


def view(look: Look, width: int, *, problem: str = "") -> RenderableType:
    """Return a look as tables for `width` columns; a `problem` stands above them."""
    parts: list[RenderableType] = [_title(look)]
    if problem:
        parts.append(Text(problem, style="bold red"))
    parts += [Text(), _lanes(look), Text(), _summary(look), Text(), _workers(look, width)]
    return Group(*parts)


def _title(look: Look) -> Text:
    partitions = f", {look.partitions} partitions" if look.partitions > 1 else ""
    return Text.assemble(("inferq top", "bold"), f"   queue {look.queue}{partitions}")


def _lanes(look: Look) -> Table:
    table = _table("LANE", "WAITING", "TAKEN", "OLDEST")
    for lane, each in look.overview.lanes.items():
        oldest = None if each.oldest_ms is None else each.oldest_ms / 1000
        table.add_row(lane.value, str(each.waiting), str(each.taken), _seconds(oldest))
    return table


def _summary(look: Look) -> Text:
    load = look.overview.load
    left_behind = look.overview.left_behind
    lines = [
        f"tokens per second: {look.generated_rate:.1f} generated, "
        f"{look.prompt_rate:.1f} of prompts",
        f"oldest job waits: {_seconds(look.oldest_s)}",
        f"jobs: {load.queued} queued, {load.running} running, {load.delayed} delayed"
        + (f", {left_behind} left behind" if left_behind else ""),
        f"tokens outstanding: {load.prompt_tokens} of prompts, {load.budget_tokens} to generate",
    ]
    text = Text("\n".join(lines) + "\n")
    dead = look.overview.dead_letters
    return text.append(f"dead letters: {dead}", style="bold red" if dead else "")


def _workers(look: Look, width: int) -> RenderableType:
    if not look.workers:
        return Text("no worker serves this queue", style="yellow")
    is_wide = width >= WIDE
    table = _table(
        *("WORKER", "STATE", "SEEN", "RUN", "WAIT", "SWAP"),
        *(("BLOCKS",) if is_wide else ()),
        *("USED", "CACHED", "TOKENS/S"),
        *(("MODEL", "VERSION") if is_wide else ()),
    )
    for worker in look.workers:
        rate = worker.generated_rate if worker.is_reporting else 0.0
        table.add_row(
            Text(worker.name),
            Text(worker.state, style=_STATE_STYLES[worker.state]),
            f"{worker.age_s:.0f} s ago",
            *(str(number) for number in (worker.running, worker.waiting, worker.swapped)),
            *((_bar(worker),) if is_wide else ()),
            f"{worker.total_blocks - worker.free_blocks}/{worker.total_blocks}",
            str(worker.cached_blocks),
            f"{rate:.1f}",
            *((Text(worker.model), Text(worker.version)) if is_wide else ()),
        )
    return table


def _bar(worker: WorkerInfo) -> Text:
    """Return the shares of used, cached and free blocks as a bar."""
    total = max(1, worker.total_blocks)
    used = round(BAR_WIDTH * (total - worker.free_blocks) / total)
    cached = min(BAR_WIDTH - used, round(BAR_WIDTH * worker.cached_blocks / total))
    free = BAR_WIDTH - used - cached
    return Text.assemble(("█" * used, "cyan"), ("▒" * cached, "blue"), ("·" * free, "dim"))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        justify: Literal["right", "left"] = "right" if column in _NUMBERS else "left"
        # a long name is folded, not cut: it is what `inferq drain` takes
        table.add_column(column, justify=justify, no_wrap=column != "WORKER", overflow="fold")
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
