"""Runs the sections one after the other and writes what they report, whatever becomes of them.

`python -m gpu [--smoke] [--only SECTION,…] [--out FOLDER]`; `run.sh` calls it. This process never
touches the GPU. A section that hangs or loses the device is ended and goes on in a new process with
its next case; the results are written after every section and at the end of the time.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType

from gpu.plan import SECTIONS, TOTAL_SECONDS
from gpu.report import Report
from gpu.worker import SectionWorker


class _Stopped(BaseException):
    """The run was told to stop."""


def main() -> int:
    """Run everything; return 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="run.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--only", default="", help="sections, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu"))
    options = parser.parse_args()
    wanted = [name for name in options.only.split(",") if name]
    if unknown := set(wanted) - {section.module for section in SECTIONS}:
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    sections = [s for s in SECTIONS if not wanted or s.module in wanted]
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    end = time.monotonic() + TOTAL_SECONDS
    with tempfile.TemporaryDirectory(prefix="inferq-gpu-") as folder:
        report = Report(options.out, smoke=options.smoke)
        workers = [
            SectionWorker(section, Path(folder), smoke=options.smoke, part=part)
            for section in sections
            for part in range(section.parts)
        ]
        waiting = set(workers)
        try:
            for stage in _run(workers, end):
                for worker in stage:
                    waiting.discard(worker)
                    report.take(worker.section, worker.records(), worker.seconds)
                for section in dict.fromkeys(worker.section for worker in stage):
                    print(report.summary(section), flush=True)
                report.write()
        except _Stopped:
            for worker in workers:
                if worker.is_started and worker in waiting:
                    report.take(worker.section, worker.records(), worker.seconds)
            report.note("stopped from outside")
        finally:
            for worker in workers:
                worker.kill()
            report.write()
    print(report.closing(), flush=True)
    return 1 if report.num_failed else 0


def _stop(_signal: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # once is enough: the results are written now
        signal.signal(number, signal.SIG_IGN)
    raise _Stopped


def _run(workers: list[SectionWorker], end: float) -> Iterator[list[SectionWorker]]:
    """Run the workers stage by stage; yields those that have ended.

    The next stage's processes start early, so that their imports take no time of their own.
    """
    stages = [list(group) for _, group in groupby(workers, key=_stage)]
    for number, stage in enumerate(stages):
        later = sum(max(w.section.seconds for w in each) for each in stages[number + 1 :])
        limit = max(time.monotonic() + 1.0, end - later)
        for worker in stage:
            worker.start()
        for worker in stage:
            worker.go(limit)
        for worker in stages[number + 1] if number + 1 < len(stages) else ():
            worker.start()
        while running := [worker for worker in stage if worker.poll()]:
            time.sleep(0.05 / len(running))
        yield stage


def _stage(worker: SectionWorker) -> str:
    return "concurrent" if worker.section.concurrent else worker.section.module


if __name__ == "__main__":
    sys.exit(main())
