"""Section: the machine, and the two rates that everything else is a share of."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib import metadata

import torch

from gpu.records import Quantity, Record
from gpu.section import Case, Settings, each
from gpu.timing import copy_bandwidth, matrix_rate

_QUERY = (
    "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,"
    "power.limit,temperature.gpu"
)


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases."""
    return (
        each("software", _software),
        each("device", lambda: _device(settings)),
        each("copy bandwidth", lambda: _copy(settings)),
        each("matrix rate", lambda: _matrix(settings)),
        each("clocks under load", _clocks),
    )


def _software() -> Record:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        **{name: metadata.version(name) for name in ("triton", "transformers", "numpy")},
        "kernel": platform.release(),
    }
    return Record("software", {name: Quantity(version) for name, version in versions.items()})


def _device(settings: Settings) -> Record:
    if settings.device.type == "cpu":
        return Record("device", {"name": Quantity(platform.processor() or "cpu")})
    found = torch.cuda.get_device_properties(settings.device)
    free, total = torch.cuda.mem_get_info(settings.device)
    return Record(
        "device",
        {
            "name": Quantity(found.name),
            "multiprocessors": Quantity(found.multi_processor_count),
            "capability": Quantity(f"{found.major}.{found.minor}"),
            "l2_cache": Quantity(found.L2_cache_size / 2**20, "MiB"),
            "memory": Quantity(total / 2**30, "GiB"),
            "free_memory": Quantity(free / 2**30, "GiB"),
        },
    )


def _copy(settings: Settings) -> Record:
    return Record("copy bandwidth", {"bandwidth": Quantity(copy_bandwidth(settings) / 1e9, "GB/s")})


def _matrix(settings: Settings) -> Record:
    return Record("matrix rate", {"rate": Quantity(matrix_rate(settings) / 1e12, "TFLOP/s")})


def _clocks() -> Record:
    """Read what nvidia-smi says, right after the matrix products."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Record("clocks under load", note="there is no nvidia-smi")
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=15)
    values = done.stdout.strip().splitlines()[0].split(", ")
    named = zip(_QUERY.split(","), values, strict=True)
    return Record("clocks under load", {name: Quantity(value) for name, value in named})
