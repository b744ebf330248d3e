"""A section's process, seen from outside: started, watched, ended, started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from gpu.plan import EXIT_DEVICE_LOST, Section
from gpu.records import read_entries

#: Seconds between telling a section to end and ending it, and the most times it is started.
_GRACE: Final = 5.0
_MAX_STARTS: Final = 4
_LOG_TAIL: Final = 4000
_IMPORT: Final = 60.0
_STACKS: Final = 0.3


class SectionWorker:
    """Runs one section, or a part of it, until its cases are done or its time is up."""

    def __init__(self, section: Section, folder: Path, *, smoke: bool, part: int = 0) -> None:
        self.section = section
        self._part = f"{part}/{section.parts}"
        #: How long it took; 0 until it has ended.
        self.seconds = 0.0
        self._smoke = smoke
        self._path = folder / f"{section.module}-{part}.jsonl"
        self._log = folder / f"{section.module}-{part}.log"
        self._process: subprocess.Popen[str] | None = None
        self._starts = 0
        self._began = self._limit = self._last_sign = 0.0
        self._seen = 0
        self._failures: list[dict[str, Any]] = []

    @property
    def is_started(self) -> bool:
        """Whether it was told to go."""
        return self._began > 0.0

    def start(self) -> None:
        """Start the process, which imports what it needs and waits; again after it ended."""
        if self._process is not None:
            return
        self._starts += 1
        command = [sys.executable, "-m", "gpu.section", self.section.module, str(self._path)]
        environment = dict(os.environ)
        command += ["--part", self._part]
        if self._smoke:
            command.append("--smoke")
            if self.section.interpreted:
                environment["TRITON_INTERPRET"] = "1"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
                start_new_session=True,  # so that what it starts ends with it
            )

    def go(self, limit: float) -> None:
        """Let it run until `limit` of time.monotonic()."""
        now = time.monotonic()
        self._began, self._limit, self._last_sign = now, limit, now
        self._send()

    def poll(self) -> bool:
        """Look after it; return whether it still runs."""
        if self._process is None:
            return False
        now = time.monotonic()
        seen = self._path.stat().st_size if self._path.is_file() else 0
        if seen != self._seen:
            self._seen, self._last_sign = seen, now
        status = self._process.poll()
        if status is not None:
            return self._ended(status, now)
        if now >= self._limit:
            self._ask_where()
            self._fail(f"ended after {now - self._began:.0f} s: the time was used up")
            return self._close(now)
        if (silent := now - self._last_sign) > self._patience():
            self._ask_where()
            self._fail(f"hung: nothing for {silent:.0f} s")
            self.kill()
            return self._again(now)
        return True

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def records(self) -> list[dict[str, Any]]:
        """Return what it reported, and how it failed."""
        found = [entry["record"] for entry in read_entries(self._path) if "record" in entry]
        return [*found, *self._failures]

    def _patience(self) -> float:
        """Give the seconds that it may be silent; importing takes what it takes."""
        ready = sum("ready" in entry for entry in read_entries(self._path))
        return self.section.stall if ready == self._starts else max(self.section.stall, _IMPORT)

    def _send(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        left = self._limit - time.monotonic() - _GRACE
        skip = [entry["begin"] for entry in read_entries(self._path) if "begin" in entry]
        with contextlib.suppress(BrokenPipeError):  # it ended while it imported: poll says how
            self._process.stdin.write(json.dumps({"seconds": left, "skip": skip}) + "\n")
            self._process.stdin.close()

    def _ended(self, status: int, now: float) -> bool:
        self._process = None
        if status in (0, 1):  # 1: it said why
            return self._close(now)
        reason = "lost the device" if status == EXIT_DEVICE_LOST else f"ended with {status}"
        self._fail(reason)
        return self._again(now)

    def _again(self, now: float) -> bool:
        if self._starts >= _MAX_STARTS:
            self._fail(f"was started {self._starts} times: given up")
        if self._starts >= _MAX_STARTS or now + _GRACE >= self._limit:
            return self._close(now)
        self.start()
        self._last_sign = now
        self._send()
        return True

    def _close(self, now: float) -> bool:
        self.kill()
        self.seconds = now - self._began
        return False

    def _ask_where(self) -> None:
        """Let it write its stacks to the log."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(_STACKS)

    def _fail(self, reason: str) -> None:
        begun = [entry["begin"] for entry in read_entries(self._path) if "begin" in entry]
        log = self._log.read_text(errors="replace")[-_LOG_TAIL:] if self._log.is_file() else ""
        self._failures.append(
            {
                "case": begun[-1] if begun else "(start)",
                "quantities": {},
                "target": None,
                "note": "",
                "skipped": "",
                "error": f"the process {reason}\n{log}",
                "status": "failed",
            }
        )
