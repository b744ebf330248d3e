"""This machine, as far as Python itself can tell: versions, open files, shared memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from inferq.cli.doctor.findings import Area, Finding
from inferq.version import __version__

_AREA: Final = Area("machine")
_DISTRIBUTION: Final = "inferq"
_LEAST_PYTHON: Final = (3, 11)
#: Open files below which a gateway cannot hold its 4,096 requests.
_FEW_FILES: Final = 4096 + 256
_SHM: Final = Path("/dev/shm")  # noqa: S108 - the system's own
#: Bytes of shared memory below which the ranks of a divided model, or NCCL, may fail.
_LITTLE_SHM: Final = 2**30
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*?)\s*(?:;\s*(.*))?")
_EXTRA: Final = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
_CLAUSE: Final = re.compile(r"(>=|<)\s*(\d+(?:\.\d+)*)")
#: Extras for people who work on inferq itself.
_NOT_FOR_USERS: Final = frozenset({"dev"})


@dataclass(frozen=True, slots=True)
class Requirement:
    """One dependency: what of it would do, and what is there (None: nothing)."""

    name: str
    wanted: str
    installed: str | None

    @property
    def is_met(self) -> bool:
        """Whether the installed version lies within what is wanted."""
        if self.installed is None:
            return False
        have = _numbers(self.installed)
        return all(
            (have >= _numbers(bound)) if sign == ">=" else (have < _numbers(bound))
            for sign, bound in _CLAUSE.findall(self.wanted)
        )


@dataclass(frozen=True, slots=True)
class System:
    """What the checks look at; sizes in bytes, None where the system has no such thing."""

    python: tuple[int, ...]
    open_files: int
    shm_bytes: int | None
    #: By extra; those of the SDK under "".
    requirements: Mapping[str, Sequence[Requirement]]

    @classmethod
    def read(cls) -> Self:
        """Look at this one."""
        return cls(
            python=sys.version_info[:3],
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            shm_bytes=shutil.disk_usage(_SHM).total if _SHM.is_dir() else None,
            requirements=read_requirements(importlib.metadata.requires(_DISTRIBUTION) or ()),
        )


def examine(system: System, *, tensor_parallel_size: int) -> list[Finding]:
    """Judge what there is."""
    return [
        _python(system),
        *_libraries(system),
        _open_files(system),
        *_shared_memory(system, tensor_parallel_size),
    ]


def _python(system: System) -> Finding:
    version = ".".join(map(str, system.python))
    if system.python < _LEAST_PYTHON:
        return _AREA.failure(
            "python", f"Python {version} is too old", "install Python 3.11 or newer"
        )
    return _AREA.ok("python", f"inferq {__version__}, Python {version}, {platform.platform()}")


def _libraries(system: System) -> Iterator[Finding]:
    for extra, requirements in system.requirements.items():
        name = f"extra {extra}" if extra else "libraries"
        absent = [each.name for each in requirements if each.installed is None]
        wrong = [each for each in requirements if each.installed is not None and not each.is_met]
        if wrong:
            yield _AREA.failure(
                name,
                "; ".join(f"{each.name} {each.installed} is not {each.wanted}" for each in wrong),
                f"pip install --upgrade '{_package(extra)}'",
            )
        elif absent and not extra:
            yield _AREA.failure(
                name, f"{', '.join(absent)}: not installed", f"pip install '{_package(extra)}'"
            )
        elif absent:
            yield _AREA.skipped(
                name, f"not installed ({absent[0]} is missing): pip install '{_package(extra)}'"
            )
        else:
            shown = ", ".join(f"{each.name} {each.installed}" for each in requirements)
            yield _AREA.ok(name, shown)


def _package(extra: str) -> str:
    return f"{_DISTRIBUTION}[{extra}]" if extra else _DISTRIBUTION


def _open_files(system: System) -> Finding:
    if system.open_files != resource.RLIM_INFINITY and system.open_files < _FEW_FILES:
        return _AREA.warning(
            "open files",
            f"at most {system.open_files}: a gateway takes 4096 requests at once, a file for each",
            "ulimit -n 65536, LimitNOFILE= of a systemd unit, or fewer --max-concurrent-requests",
        )
    return _AREA.ok("open files", f"at most {system.open_files}")


def _shared_memory(system: System, tensor_parallel_size: int) -> Iterator[Finding]:
    size = system.shm_bytes
    if size is None:
        return
    shown = f"{size / 2**20:.0f} MiB at {_SHM}"
    if tensor_parallel_size > 1 and size < _LITTLE_SHM:
        yield _AREA.warning(
            "shared memory",
            f"{shown}: the {tensor_parallel_size} ranks of a model meet there",
            "docker run --shm-size=1g; in Kubernetes an emptyDir of medium Memory at /dev/shm",
        )
    else:
        yield _AREA.ok("shared memory", shown)


def read_requirements(lines: Iterable[str]) -> dict[str, list[Requirement]]:
    """Read a distribution's requirements, by extra, as far as they are for this platform."""
    found: dict[str, list[Requirement]] = {}
    for line in lines:
        match = _REQUIREMENT.fullmatch(line)
        if match is None or match[1] == _DISTRIBUTION:
            continue
        name, wanted, marker = match[1], match[2], match[3] or ""
        extra = named[1] if (named := _EXTRA.search(marker)) else ""
        if extra in _NOT_FOR_USERS or not _is_for_this_platform(marker):
            continue
        found.setdefault(extra, []).append(Requirement(name, wanted, _installed(name)))
    return found


def _is_for_this_platform(marker: str) -> bool:
    """Whether the parts of a marker that name a platform name this one."""
    facts = {
        "platform_system": platform.system(),
        "platform_machine": platform.machine(),
        "sys_platform": sys.platform,
        "os_name": os.name,
    }
    named = re.findall(r"""(\w+)\s*==\s*['"]([^'"]+)['"]""", marker)
    return all(facts.get(name, value) == value for name, value in named)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
