"""What the log says of calls that fail, by a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from structlog import get_logger
from structlog.testing import capture_logs

from inferq.worker.queue import outage as outage_module
from inferq.worker.queue.outage import Outage


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(outage_module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def test_an_hour_without_a_server_is_told_in_some_sixty_lines(clock: Clock) -> None:
    outage = Outage(get_logger(), "claim")
    outage.succeeded()
    with capture_logs() as lines:
        for _ in range(7200):
            outage.failed(OSError("away"))
            clock.now += 0.5
        outage.succeeded()
        outage.succeeded()
    told = [line for line in lines if line["log_level"] != "debug"]
    assert [line["log_level"] for line in told] == ["warning", *["error"] * 60, "info"]
    assert told[0]["event"] == "claim failed, will retry"
    assert (told[1]["event"], told[1]["for_s"]) == ("claim still fails, will retry", 5.0)
    assert (told[-1]["event"], told[-1]["after_s"]) == ("claim succeeds again", 3600.0)


def test_a_second_outage_is_told_from_its_beginning(clock: Clock) -> None:
    outage = Outage(get_logger(), "publish")
    outage.failed(OSError("away"))
    outage.succeeded()
    clock.now += 1.0
    with capture_logs() as lines:
        outage.failed(OSError("away"))
        clock.now += 4.0
        outage.failed(OSError("away"))
    assert [line["log_level"] for line in lines] == ["warning", "debug"]
