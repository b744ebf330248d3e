"""Builds the shared library of this folder's C++ sources with the machine's own compiler."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parent

#: Contraction and branch-free selects keep what NaN and infinity mean: no -ffast-math.
_FLAGS: Final = (
    "-O3", "-std=c++17", "-fPIC", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=fast", "-Wno-psabi",
)  # fmt: skip
_COMPILERS: Final = ("c++", "g++", "clang++")
#: Seconds for one source file; the largest takes about 10 on one Zen 4 core.
_TIME_LIMIT: Final = 300.0


class NativeBuildError(RuntimeError):
    """There is no usable compiler, or it could not build the sources; the message says why."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler with its flags, and the OpenMP runtime that the library is linked against."""

    command: tuple[str, ...]
    version: str
    runtime: Path

    @classmethod
    def find(cls, runtime: Path) -> Toolchain:
        """Take $CXX, else the first compiler on the path; `NativeBuildError` where there is none.

        A $CXX that cannot run is an error, not a reason to take another.
        """
        own = shlex.split(os.environ.get("CXX", ""))
        found = own or [path for path in map(shutil.which, _COMPILERS) if path][:1]
        if not found:
            raise NativeBuildError(f"no C++ compiler ({', '.join(_COMPILERS)}; $CXX is not set)")
        return cls(tuple(found), _run([*found, "--version"]), runtime)

    def fingerprint(self) -> str:
        """Return a digest of all that decides what the library holds."""
        digest = hashlib.sha256()
        parts = [*self.command, *_flags(), self.version, str(self.runtime), _processor()]
        for part in parts:
            digest.update(part.encode() + b"\0")
        for source in _sources("*.cpp", "*.h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        return digest.hexdigest()

    def build(self, target: Path) -> None:
        """Compile and link `target`, which appears complete or not at all.

        Raises `NativeBuildError` with the compiler's own words.
        """
        with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as name:
            folder = Path(name)
            objects = [folder / f"{source.stem}.o" for source in _sources("*.cpp")]
            _run_all(
                [*self.command, *_flags(), "-c", str(source), "-o", str(compiled)]
                for source, compiled in zip(_sources("*.cpp"), objects, strict=True)
            )
            linked = folder / target.name
            # The runtime by its path: its own name then stands in the library, whatever it is, and
            # the loader finds the copy that torch has loaded.
            inputs = [*map(str, objects), str(self.runtime)]
            _run([*self.command, "-shared", "-Wl,-z,defs", "-o", str(linked), *inputs])
            linked.replace(target)


def _flags() -> list[str]:
    native = "-march=native" if platform.machine() in {"x86_64", "AMD64"} else "-mcpu=native"
    return [*_FLAGS, native]


def _sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in SOURCES.glob(pattern))


def _processor() -> str:
    """Return what -march=native depends on: a cache in a shared home serves unequal machines."""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _run(command: list[str]) -> str:
    """Run a command to its end and return what it prints."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIME_LIMIT,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(str(error)) from error
    if done.returncode:
        raise NativeBuildError(f"{shlex.join(command[:1])} failed: {_tail(done.stderr)}")
    return done.stdout


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run all commands side by side, as many as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))


def _tail(text: str) -> str:
    return text.strip()[-2000:] or "no message"
