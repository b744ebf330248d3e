"""What log lines of a process show, and what they never do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

FAULT = """
import logging, sys, structlog
from inferq.runtime.logs import configure_logging

def fail(prompt):
    raise ValueError("no such thing")

configure_logging("info", sys.argv[1])
for logger in (structlog.get_logger("inferq.own"), logging.getLogger("inferq.other")):
    try:
        fail("my " + "secret")
    except ValueError:
        logger.exception("it failed")
"""


@pytest.mark.parametrize("form", ["json", "pretty"])
def test_a_traceback_shows_the_fault_and_no_local_variables(form: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULT, form], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.count("ValueError: no such thing") == 2
    assert "in fail" in done.stderr
    assert "my secret" not in done.stderr


ABOUT_A_JOB = """
import sys, structlog
from inferq.runtime.logs import configure_logging

configure_logging("info", sys.argv[1], show_prompts=sys.argv[2] == "show")

def read(prompt):
    try:
        int(prompt)
    except ValueError as error:
        raise RuntimeError("cannot serve " + prompt) from error

try:
    read("my" + " secret")
except RuntimeError as error:
    structlog.get_logger("inferq.jobs").error("it failed", fault=error)
"""


@pytest.mark.parametrize("form", ["json", "pretty"])
@pytest.mark.parametrize("shown", ["show", "hide"])
def test_a_fault_about_a_job_has_its_place_and_says_what_was_asked_only_if_wanted(
    form: str, shown: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ABOUT_A_JOB, form, shown],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for said in ("it failed", "in read", "RuntimeError", "ValueError"):
        assert said in done.stderr
    assert ("my secret" in done.stderr) is (shown == "show")
    assert "fault=" not in done.stderr


ENDING = """
import sys, threading, warnings
from inferq.runtime.logs import configure_logging

configure_logging("info", "json")
warnings.warn("old", stacklevel=1)
thread = threading.Thread(target=lambda: 1 / 0, name="some")
thread.start()
thread.join()
raise RuntimeError("no more")
"""


def test_warnings_and_what_ends_a_thread_or_the_process_are_lines_of_the_same_form() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    warning, thread, end = map(json.loads, done.stderr.splitlines())
    assert (warning["level"], "UserWarning: old" in warning["event"]) == ("warning", True)
    assert (thread["event"], thread["level"], thread["thread"]) == (
        "a thread fails",
        "critical",
        "some",
    )
    assert "ZeroDivisionError" in thread["exception"]
    assert end["event"] == "the process fails"
    assert "RuntimeError: no more" in end["exception"]
