"""Processes that a command starts, and takes down again however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from inferq.watchdog import Watchdog

#: Seconds between two looks at a process.
LOOK_S: Final = 0.05
#: Seconds that a process has to end after it was told to hurry.
HURRY_S: Final = 5.0


class Signals:
    """Counts SIGINT, SIGTERM and SIGHUP instead of being ended by them.

    Those that are ignored when it begins (SIGHUP under nohup) stay so.
    """

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count inside the body."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._count) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _count(self, *_: object) -> None:
        self.count += 1


#: Starts an `inferq` command; -P: what lies in the working directory must not pass for a module.
INFERQ: Final = (sys.executable, "-P", "-m", "inferq")


class ManagedProcess:
    """A command in a session of its own, which does not outlive this process.

    A Ctrl-C in the terminal does not reach it: whoever started it decides. `directory` is where it
    works; `environment` is added to ours, where None takes a variable away; `leftover` is a
    directory to remove if we cannot do it any more.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        directory: Path | None = None,
        environment: Mapping[str, str | None] = {},
        stderr: IO[bytes] | None = None,
        leftover: Path | None = None,
    ) -> None:
        self.name = name
        self._is_buried = False
        variables = {**os.environ, **environment}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            cwd=directory,
            env={key: value for key, value in variables.items() if value is not None},
            start_new_session=True,
        )
        try:
            self._watchdog = Watchdog(self._process.pid, directory=leftover)
        except BaseException:
            self._process.kill()
            raise

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs, negative for a signal."""
        return self._process.poll()

    def end(self, timeout_s: float, signals: Signals | None = None) -> bool:
        """End it by SIGTERM, or kill its whole session after `timeout_s`; return if it was gentle.

        Of the signals that come meanwhile, the first makes it hurry (a second signal, as `inferq`'s
        processes take it, and `HURRY_S`); a further one kills it.
        """
        give_up_at = time.monotonic() + timeout_s
        before = 0 if signals is None else signals.count
        hurries = 0
        self._send(signal.SIGTERM)
        while self.exit_code is None and time.monotonic() < give_up_at:
            if signals is not None and signals.count > before + hurries:
                hurries += 1
                give_up_at = 0 if hurries > 1 else min(give_up_at, time.monotonic() + HURRY_S)
                self._send(signal.SIGINT)
            time.sleep(LOOK_S)
        is_gentle = self.exit_code is not None
        self.kill()
        return is_gentle

    def kill(self) -> None:
        """Kill what is left of it and of what it started; a second time there is nothing to do."""
        if self._is_buried:
            return
        self._is_buried = True
        with contextlib.suppress(ProcessLookupError):  # nothing is
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._watchdog.dismiss()

    def _send(self, number: signal.Signals) -> None:
        if self.exit_code is None:
            self._process.send_signal(number)
