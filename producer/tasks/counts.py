"""What the processes that perform tasks did, in memory that the process before them reads."""

from __future__ import annotations

import ctypes
from collections.abc import Awaitable, Callable, MutableSequence
from enum import StrEnum
from functools import wraps
from multiprocessing.context import SpawnContext
from typing import Any, Final, Self

from inferq.producer.tasks.safe_rq import TaskRefused, Tasks


class Counted(StrEnum):
    """What is counted, each by labels of its own."""

    #: By what became of it.
    ATTEMPT = "attempt"
    #: By the task's name and how it ended.
    RUN = "run"
    #: By whether it succeeded.
    LINE = "line"


#: Names of tasks, in the order of their cells.
TASK_NAMES: Final = (
    *("deliver_webhooks", "sweep", "promote_delayed", "trim_dead_letters"),
    *("run_batches", "expire_batches"),
)
#: Every place there is: what is counted, then its labels.
PLACES: Final = (
    *((Counted.ATTEMPT, outcome) for outcome in ("delivered", "retry", "dead", "postponed")),
    *((Counted.RUN, name, end) for name in TASK_NAMES for end in ("done", "failed")),
    (Counted.RUN, "other", "refused"),
    *((Counted.LINE, outcome) for outcome in ("completed", "failed")),
)
_CELL_OF: Final = {place: cell for cell, place in enumerate(PLACES)}


class TaskCounts:
    """One number for each of `PLACES`; one process adds, any reads, and nobody holds a lock.

    Memory that is shared outlives the process that adds: its successor goes on.
    """

    def __init__(self, cells: MutableSequence[int] | None = None) -> None:
        self._cells: MutableSequence[int] = [0] * len(PLACES) if cells is None else cells

    @classmethod
    def shared(cls, context: SpawnContext) -> Self:
        """Return counts in shared memory, to be handed to a process when it is started."""
        cells: Any = context.RawArray(ctypes.c_uint64, len(PLACES))
        return cls(cells)

    def add(self, counted: Counted, *labels: str, number: int = 1) -> None:
        """Count something that happened."""
        self._cells[_CELL_OF[counted, *labels]] += number

    def read(self, counted: Counted) -> dict[tuple[str, ...], int]:
        """Return the numbers of one kind by their labels."""
        return {
            place[1:]: self._cells[cell] for cell, place in enumerate(PLACES) if place[0] is counted
        }

    def kept(self, completed: int, failed: int) -> None:
        """Count lines of batches."""
        self.add(Counted.LINE, "completed", number=completed)
        self.add(Counted.LINE, "failed", number=failed)

    def refused(self) -> None:
        """Count what was no task."""
        self.add(Counted.RUN, "other", "refused")

    def around(self, tasks: Tasks) -> dict[str, Callable[..., Awaitable[None]]]:
        """Return the tasks, each of which counts how it ends."""
        return {name: self._counted(name, task) for name, task in tasks.items()}

    def _counted(self, name: str, task: Callable[..., Any]) -> Callable[..., Awaitable[None]]:
        @wraps(task)
        async def run(*arguments: Any) -> None:
            try:
                await task(*arguments)
            except TaskRefused:
                raise
            except BaseException:
                self.add(Counted.RUN, name, "failed")
                raise
            self.add(Counted.RUN, name, "done")

        return run
