"""How far a batch is, on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from inferq.producer.batches.records import Counts

#: Seconds between two lines where there is no terminal.
LINE_INTERVAL_S: Final = 5.0

Show = Callable[[Counts], None]


@contextmanager
def shown_progress() -> Iterator[Show]:
    """Show what the function that it yields is told; the extra `cli` makes a bar of it."""
    if not sys.stderr.isatty():
        yield PlainProgress().show
        return
    try:
        import rich.progress  # noqa: F401
    except ModuleNotFoundError:
        yield PlainProgress().show
    else:
        with _bar() as show:
            yield show


class PlainProgress:
    """Writes lines, the first at once and then no more than one in `LINE_INTERVAL_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = 0.0
        self._shown = Counts()

    def show(self, counts: Counts) -> None:
        """Say where it stands, unless that was just said."""
        now = self._clock()
        if now < self._next_s or counts == self._shown:
            return
        self._next_s, self._shown = now + LINE_INTERVAL_S, counts
        print(f"inferq: {describe(counts)}", file=sys.stderr, flush=True)


def describe(counts: Counts) -> str:
    """Return counts in words."""
    text = f"{counts.ended} of {counts.total} done"
    if counts.failed:
        text += f", {counts.failed} failed"
    return f"{text}, {counts.completion_tokens} tokens"


@contextmanager
def _bar() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("[red]{task.fields[failed]}"),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), expand=True) as progress:
        task = progress.add_task("", total=None, failed="", tokens=0, rate=0.0)
        first: Counts | None = None
        began = time.monotonic()

        def show(counts: Counts) -> None:
            nonlocal first, began
            if first is None:
                # what an earlier run has done tells nothing of how fast this one is
                first, began = counts, time.monotonic()
                progress.reset(task, total=counts.total, completed=counts.ended)
            seconds = max(time.monotonic() - began, 0.001)
            progress.update(
                task,
                total=counts.total,
                completed=counts.ended,
                failed=f"{counts.failed} failed" if counts.failed else "",
                tokens=counts.completion_tokens,
                rate=(counts.completion_tokens - first.completion_tokens) / seconds,
            )

        yield show
