"""What log lines of a process show, and what they never do."""

from __future__ import annotations

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
