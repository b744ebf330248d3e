"""One section, or a part of it, in a process of its own.

`python -m gpu.section MODULE RECORDS [--part 0/1] [--smoke]` imports what it needs, waits for a
line `{"seconds": …, "skip": [cases]}` on its standard input, and runs its cases. One that raises is
recorded with its traceback; if the device does not answer after it, the process ends with status
`EXIT_DEVICE_LOST`, and the rest goes to a new one.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import torch

from gpu.plan import EXIT_DEVICE_LOST
from gpu.records import Record, Recorder

#: Of the host: many sections run at once.
_THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """Where the cases run and how large they may be."""

    device: torch.device
    #: Tiny shapes on the CPU: proves that every line runs, measures nothing.
    smoke: bool
    #: time.monotonic() at which the section should have ended.
    deadline: float

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and caches; Triton's interpreter cannot multiply bfloat16."""
        return torch.float32 if self.smoke else torch.bfloat16

    @property
    def seconds_left(self) -> float:
        """Time until the deadline."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True, slots=True)
class Case:
    """A named piece of a section; its records are written as they are yielded."""

    name: str
    run: Callable[[], Iterable[Record]]


def main() -> int:
    """Run the section's cases that are not to be skipped; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("records", type=Path)
    parser.add_argument("--part", default="0/1", help="which of how many parts of the cases")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)  # asked by who ends it: where does it hang?
    recorder = Recorder(options.records)
    try:
        module = importlib.import_module(f"gpu.{options.module}")
        recorder.ready()
        order = json.loads(sys.stdin.readline())
        if not options.smoke and not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device; --smoke runs tiny shapes on the CPU")
        device = torch.device("cpu" if options.smoke else "cuda:0")
        settings = Settings(device, options.smoke, time.monotonic() + order["seconds"])
        torch.manual_seed(0)
        torch.set_num_threads(1 if options.smoke else _THREADS)
        with torch.inference_mode():
            first, parts = map(int, options.part.split("/"))
            cases = islice(module.cases(settings), first, None, parts)
            return _run(cases, set(order["skip"]), settings, recorder)
    except Exception:  # noqa: BLE001 - reported
        recorder.add(Record("(section)", error=traceback.format_exc()))
        return 1


def _run(cases: Iterable[Case], skip: set[str], settings: Settings, recorder: Recorder) -> int:
    for case in cases:
        if case.name in skip:
            continue
        if settings.seconds_left <= 0:
            recorder.add(Record(case.name, skipped="the section's time was used up"))
            continue
        recorder.begin(case.name)
        try:
            for record in case.run():
                recorder.add(record)
            _synchronize(settings.device)
        except Exception:  # noqa: BLE001 - reported
            recorder.add(Record(case.name, error=traceback.format_exc()))
        if not _answers(settings.device):
            return EXIT_DEVICE_LOST
    return 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _answers(device: torch.device) -> bool:
    """Whether the device still computes: an illegal access breaks it for the whole process."""
    try:
        return float(torch.ones(8, device=device).sum()) == 8.0
    except RuntimeError:
        traceback.print_exc()
        return False


def each(name: str, run: Callable[[], Record]) -> Case:
    """Make a case of a function that gives one record."""

    def records() -> Iterator[Record]:
        yield run()

    return Case(name, records)


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)  # whatever threads a library has left running
