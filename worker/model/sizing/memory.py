"""How much memory this process may still take."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

import torch

_CGROUP: Final = Path("/sys/fs/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the bytes of host memory that can be used without swapping.

    The smaller of what the machine has free and what the container (cgroup v2) still allows.
    """
    free = _machine_free(meminfo)
    allowed = _container_free(cgroup)
    return free if allowed is None else min(free, allowed)


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be had on `device`, the host's for the CPU."""
    if device.type != "cuda":
        return available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    # Blocks that torch keeps for reuse are free as well.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def return_freed_memory() -> None:
    """Give memory that was freed back to the system, where the C library keeps it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def format_bytes(count: float) -> str:
    """Return a size for people, as `3.2 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _machine_free(meminfo: Path) -> int:
    if not meminfo.is_file():
        # Not Linux: the free part is not known; half of what is installed is a careful guess.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    rows = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    return int(rows["MemAvailable"].split()[0]) * 1024


def _container_free(cgroup: Path) -> int | None:
    limit_file = cgroup / "memory.max"
    if not limit_file.is_file():
        return None
    limit = limit_file.read_text().strip()
    if limit == "max":
        return None
    used = int((cgroup / "memory.current").read_text())
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    # Page cache that nobody needed lately is given back on demand.
    return max(0, int(limit) - used + int(stat.get("inactive_file", "0")))
