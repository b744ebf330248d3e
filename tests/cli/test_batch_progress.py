"""How far a batch is: lines now and then, or a bar where there is a terminal and rich."""

from __future__ import annotations

import io
import sys

import pytest

from inferq.cli import batch_progress
from inferq.cli.batch_progress import PlainProgress, shown_progress
from inferq.producer.batches.records import Counts


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_now_and_then_and_say_something_new(capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    progress = PlainProgress(lambda: now)
    for done, seconds in ((0, 0.0), (1, 4.9), (2, 5.0), (2, 20.0), (3, 30.0)):
        now = 100.0 + seconds
        progress.show(
            Counts(total=10, completed=done, failed=done // 3, completion_tokens=done * 7)
        )
    assert capsys.readouterr().err.splitlines() == [
        "inferq: 0 of 10 done, 0 tokens",
        "inferq: 2 of 10 done, 14 tokens",
        "inferq: 4 of 10 done, 1 failed, 21 tokens",
    ]


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_terminal_gets_a_bar_if_rich_is_there(
    monkeypatch: pytest.MonkeyPatch, has_rich: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    with shown_progress() as show:
        show(Counts(total=10, completed=4, completion_tokens=40))
        show(Counts(total=10, completed=9, failed=1, completion_tokens=90))
    written = terminal.getvalue()
    if has_rich:
        assert "10/10" in written
        assert "1 failed" in written
        assert "90 tokens" in written
        assert "\x1b[" in written
    else:
        assert written == "inferq: 4 of 10 done, 40 tokens\n"


def test_elsewhere_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress() as show:
        show(Counts(total=2, completed=1))
    assert capsys.readouterr().err == f"inferq: {batch_progress.describe(Counts(2, 1))}\n"
