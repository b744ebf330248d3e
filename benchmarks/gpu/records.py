"""What a section reports: one JSON line for each thing measured, written when it is known."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and its unit."""

    value: float | int | str | bool
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """What a quantity should reach: `at_least`, or `at_most`."""

    name: str
    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, quantities: dict[str, Quantity]) -> bool:
        """Whether the named quantity is within the bounds; one that is absent or NaN is not."""
        found = quantities.get(self.name)
        if found is None or isinstance(found.value, str):
            return False
        above = self.at_least is None or found.value >= self.at_least
        below = self.at_most is None or found.value <= self.at_most
        return above and below


@dataclass(frozen=True, slots=True)
class Record:
    """One result; with `error` (a traceback) it is what did not work."""

    case: str
    quantities: dict[str, Quantity] = field(default_factory=dict)
    target: Target | None = None
    note: str = ""
    error: str = ""
    #: Why it was not run.
    skipped: str = ""

    @property
    def status(self) -> str:
        """Say `failed`, `skipped`, `missed` (its target), `met`, or `measured` without a target."""
        if self.error:
            return "failed"
        if self.skipped:
            return "skipped"
        if self.target is None:
            return "measured"
        return "met" if self.target.is_met(self.quantities) else "missed"


class Recorder:
    """Appends records and the begin of each case to a file that another process reads."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def ready(self) -> None:
        """Say that what is needed has been imported."""
        self._write({"ready": True})

    def begin(self, case: str) -> None:
        """Say that a case begins, so that a crash can be told to be its."""
        self._write({"begin": case})

    def add(self, record: Record) -> None:
        """Write a record."""
        self._write({"record": {**asdict(record), "status": record.status}})

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps({"at": time.time(), **entry}) + "\n")
        self._file.flush()


def read_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what was written so far; a half-written last line is left out."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
