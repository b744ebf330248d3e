"""Processes that a command starts: ended gently, in a hurry, or by force, and never left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferq.cli import main, processes
from inferq.cli.processes import ManagedProcess, Signals

Start = Callable[[str], ManagedProcess]

GENTLE = "import time; print('up', flush=True); time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + GENTLE
VERY_DEAF = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + DEAF


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start Python on a program that says in a file when it is up."""
    started: list[ManagedProcess] = []

    def call(program: str) -> ManagedProcess:
        up = tmp_path / f"up-{len(started)}"
        program = program.replace("print('up', flush=True)", f"open({str(up)!r}, 'w').close()")
        started.append(ManagedProcess("program", [sys.executable, "-c", program]))
        wait_until(up.exists)
        return started[-1]

    yield call
    for process in started:
        process.kill()


def test_a_process_that_heeds_sigterm_ends_gently(start: Start) -> None:
    process = start(GENTLE)
    assert process.exit_code is None
    assert process.end(10)
    assert process.exit_code == -signal.SIGTERM


def test_a_process_that_does_not_is_killed_when_its_time_is_up(start: Start) -> None:
    process = start(DEAF)
    assert not process.end(0.3)
    assert process.exit_code == -signal.SIGKILL


@pytest.mark.parametrize(("program", "ends_by"), [(DEAF, "hurry"), (VERY_DEAF, "force")])
def test_a_second_signal_hurries_and_a_third_kills(
    start: Start, monkeypatch: pytest.MonkeyPatch, program: str, ends_by: str
) -> None:
    """Nothing else ends it within the time that a test has."""
    monkeypatch.setattr(processes, "HURRY_S", 600.0)
    process, signals = start(program), Signals()

    def send_twice() -> None:
        for _ in range(2):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)

    with signals.counted():
        sender = threading.Thread(target=send_twice)
        sender.start()
        is_gentle = process.end(600.0, signals)
        sender.join()
    assert is_gentle is (ends_by == "hurry")


def test_what_it_started_is_killed_with_it(start: Start, tmp_path: Path) -> None:
    note = tmp_path / "child"
    process = start(
        "import subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {VERY_DEAF!r}]); "
        f"open({str(note)!r}, 'w').write(str(child.pid)); " + VERY_DEAF
    )
    child = int(note.read_text())
    assert is_alive(child)
    process.kill()
    wait_until(lambda: not is_alive(child))


def test_it_does_not_outlive_the_one_that_started_it(tmp_path: Path) -> None:
    leftover = tmp_path / "leftover"
    leftover.mkdir()
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from inferq.cli.processes import ManagedProcess\n"
        f"child = ManagedProcess('child', [sys.executable, '-c', {DEAF!r}],"
        f" leftover=Path({str(leftover)!r}))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 15
    while (is_alive(child) or leftover.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)
    assert not leftover.exists()


def test_a_signal_that_was_ignored_before_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = Signals()
        with signals.counted():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.count == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.count == 1
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interruption_while_the_commands_load_is_one_like_any_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "inferq.cli.parser", Interrupted())
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main(["queue"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "inferq: interrupted\n"
