"""How busy the machine was: the cores that we used, that others used, and that were stolen.

Read from /proc, so on Linux only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    #: CPU ticks of the process and of its children that have ended.
    ticks: int


@dataclass(frozen=True, slots=True)
class LoadMeter:
    """The counters at one moment; `since` compares them with those of now."""

    at: float
    busy_ticks: int
    stolen_ticks: int
    own_ticks: int

    @classmethod
    def start(cls) -> Self:
        """Read the counters."""
        at = time.perf_counter()
        with Path("/proc/stat").open() as stat:
            user, nice, system, _, _, irq, softirq, stolen = map(int, stat.readline().split()[1:9])
        processes = _processes()
        own = sum(processes[pid].ticks for pid in _family(processes, os.getpid()))
        return cls(at, user + nice + system + irq + softirq, stolen, own)

    def figures(self) -> dict[str, float]:
        """Return the mean numbers of cores since the start: own, others', stolen; and the load."""
        now = LoadMeter.start()
        ticks = _TICKS_PER_S * max(now.at - self.at, 1e-9)
        own = now.own_ticks - self.own_ticks
        return {
            "own_cores": own / ticks,
            "foreign_cores": max(now.busy_ticks - self.busy_ticks - own, 0) / ticks,
            "steal_cores": (now.stolen_ticks - self.stolen_ticks) / ticks,
            "load1": os.getloadavg()[0],
        }


class CpuMeter:
    """CPU seconds of named processes since the start, or since the last reading."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._start = self._read()

    def seconds(self) -> dict[str, float]:
        """Return the CPU seconds of each since the start or the last call."""
        now = self._read()
        used = {name: now[name] - self._start[name] for name in now}
        self._start = now
        return used

    def _read(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self._pids.items()}


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, to the microsecond where it is told."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def children(pid: int) -> list[int]:
    """Return the living children of a process."""
    return [child for child, process in _processes().items() if process.parent == pid]


def _processes() -> dict[int, _Process]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # it has just ended
                continue
            found[int(folder.name)] = _Process(int(fields[1]), sum(map(int, fields[11:15])))
    return found


def _family(processes: dict[int, _Process], root: int) -> Iterable[int]:
    """Yield a process and its living descendants."""
    for pid in processes:
        ancestor = pid
        while ancestor in processes and ancestor != root:
            ancestor = processes[ancestor].parent
        if ancestor == root:
            yield pid
