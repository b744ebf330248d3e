"""Sees to it that what this process started does not outlive it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

# Waits until its standard input closes, which happens when the process that started it is gone,
# however it went; then ends the other one, kills what is left of its group, and removes the
# directory, if one was named.
_SCRIPT: Final = """
read -r _ || :
kill "$1" 2>/dev/null
n=0
while kill -0 "$1" 2>/dev/null && [ $((n += 1)) -le 200 ]; do sleep 0.05; done
kill -9 "-$1" 2>/dev/null
if [ -n "$2" ]; then rm -rf -- "$2"; fi
"""


class Watchdog:
    """Ends a process (SIGTERM, then SIGKILL to its group) when this one is gone; POSIX only.

    The process must lead a group of its own. `directory` is removed after it.
    """

    def __init__(self, pid: int, *, directory: Path | None = None) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "inferq-watchdog", str(pid), str(directory or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )

    def dismiss(self) -> None:
        """End the watchdog; it touches nothing."""
        self._process.kill()
        # before its input closes, which would be its signal
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
