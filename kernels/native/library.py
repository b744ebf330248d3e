"""Loads the native kernels: from the cache, or freshly compiled; None where that cannot be."""

from __future__ import annotations

import ctypes
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from inferq.kernels.native.compiler import NativeBuildError, Toolchain
from inferq.kernels.native.mode import VARIABLE, native_mode

_log = logging.getLogger(__name__)

#: How a dtype is told to a kernel (`with_dtype` in simd.h).
DTYPE_CODES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_RUNTIMES: Final = ("libgomp", "libiomp5", "libomp")
_TYPES: Final[dict[str, Any]] = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
}


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A call that was made while calls were noted."""

    repeat: int
    """Address of the function that makes it again, given its arguments in memory."""
    signature: str
    arguments: tuple[Any, ...]


#: Where the calls of this thread are noted, if they are.
noted_calls: ContextVar[list[NativeCall] | None] = ContextVar("noted_calls", default=None)


class NativeFunction:
    """A function of the library, which releases the interpreter lock during calls."""

    __slots__ = ("_function", "_repeat", "_signature")

    def __init__(self, library: ctypes.CDLL, name: str, signature: str) -> None:
        self._function = library[name]
        self._function.argtypes = [_TYPES[letter] for letter in signature]
        self._function.restype = None
        self._repeat = ctypes.cast(library[f"{name}_repeat"], ctypes.c_void_p).value or 0
        self._signature = signature

    def __call__(self, *arguments: Any) -> None:
        """Call it."""
        if (noted := noted_calls.get()) is not None:
            noted.append(NativeCall(self._repeat, self._signature, arguments))
        self._function(*arguments)


class NativeLibrary:
    """The loaded library. Its functions return nothing and trust their arguments."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def function(self, name: str, signature: str) -> Callable[..., None]:
        """Return a function; `signature` has a letter per argument, as `INFERQ_EXPORT` gives it.

        p: an address, l: int64, i: int32, f: float32. Raises `RuntimeError` where the library's
        differs.
        """
        describe = self._library[f"{name}_signature"]
        describe.restype = ctypes.c_char_p
        if (actual := describe().decode()) != signature:
            raise RuntimeError(f"{name} takes ({actual}), not ({signature})")
        return NativeFunction(self._library, name, signature)


@cache
def load_native() -> NativeLibrary | None:
    """Return the native kernels, or None where they cannot be built or are switched off.

    The first call of a process may compile for some seconds; it logs once what came of it.
    $INFERQ_NATIVE_KERNELS says whether they are wanted (see `native_mode`, which raises
    `ValueError`); with require, `NativeBuildError` instead of None.
    """
    mode = native_mode()
    if mode == "off":
        _log.info("Native kernels are off (%s): the slower torch forms run", VARIABLE)
        return None
    try:
        return _load()
    except NativeBuildError as error:
        if mode == "require":
            raise NativeBuildError(f"native kernels: {error}") from error
        _log.warning("No native kernels, the slower torch forms run: %s", error)
        return None


@cache
def native_function(name: str, signature: str) -> Callable[..., None] | None:
    """Return a native kernel (see `NativeLibrary.function`), or None where there are none."""
    library = load_native()
    return library.function(name, signature) if library else None


def _load() -> NativeLibrary:
    toolchain = Toolchain.find(_openmp_runtime())
    name = f"{toolchain.fingerprint()}.so"
    try:
        return _load_cached(toolchain, _private_folder() / name)
    except OSError as error:
        _log.warning("Native kernels are compiled for this process only: %s", error)
    with tempfile.TemporaryDirectory(prefix="inferq-native-") as folder:
        return _build(toolchain, Path(folder) / name)


def _load_cached(toolchain: Toolchain, path: Path) -> NativeLibrary:
    if path.exists():
        try:
            return NativeLibrary(path)
        except OSError as error:
            _log.warning("Native kernels are compiled anew, %s is broken: %s", path, error)
    return _build(toolchain, path)


def _build(toolchain: Toolchain, path: Path) -> NativeLibrary:
    started = time.monotonic()
    toolchain.build(path)
    seconds = time.monotonic() - started
    _log.info("Native kernels compiled in %.0f s with %s", seconds, toolchain.command[0])
    try:
        return NativeLibrary(path)
    except OSError as error:
        raise NativeBuildError(f"the library does not load: {error}") from error


def _private_folder() -> Path:
    """Return the cache's folder; `PermissionError` where others could put code into it."""
    folder = _cache_root() / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} is another user's or writable by others")
    return folder


def _cache_root() -> Path:
    """Return $INFERQ_CACHE, else $XDG_CACHE_HOME/inferq, else ~/.cache/inferq."""
    if own := os.environ.get("INFERQ_CACHE"):
        return Path(own).expanduser().resolve()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser().resolve() / "inferq"
    return Path.home() / ".cache" / "inferq"


def _openmp_runtime() -> Path:
    """Return the file of the OpenMP runtime that torch has loaded into this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise NativeBuildError(f"cannot tell torch's OpenMP runtime: {error}") from error
    paths = (Path(line.split(maxsplit=5)[5]) for line in lines if "/" in line)
    for path in paths:
        if path.name.startswith(_RUNTIMES):
            return path
    raise NativeBuildError("torch has loaded no OpenMP runtime")
