"""What people see while weights are loaded."""

from __future__ import annotations

import logging
import time

import pytest

from inferq.worker.model.loading.load_progress import LoadProgress

MIB = 2**20


class Terminal:
    """Stands in for stderr, and keeps what was written."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.is_terminal, self.text = is_terminal, ""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_a_log_gets_a_line_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream, now = Terminal(is_terminal=False), 100.0
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with caplog.at_level(logging.INFO), LoadProgress(8 * MIB) as progress:
        for seconds in (4.0, 2.0, 1.0, 4.5):
            now += seconds
            progress.add(2 * MIB)
    assert caplog.messages == [
        "loading weights: 50 % of 8.0 MiB",
        "loading weights: 100 % of 8.0 MiB",
    ]
    assert stream.text == ""


def test_a_terminal_gets_a_bar_and_no_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Terminal(is_terminal=True)
    monkeypatch.setattr("sys.stderr", stream)
    with caplog.at_level(logging.INFO), LoadProgress(8 * MIB) as progress:
        progress.add(8 * MIB)
    assert "loading weights" in stream.text
    assert "8.00M" in stream.text
    assert caplog.messages == []
