"""What a rank says comes out of rank 0's logging, whatever it is."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from inferq.worker.model.ranks.rank_logs import relay

RANK = """
import logging, os, sys, warnings
from inferq.worker.model.ranks.rank_logs import write_records

write_records()
log = logging.getLogger("inferq.worker.model")
log.info("rank 0 says that")
log.warning("odd: %d", 7)
os.write(2, b"a library's own words\\n")
os.write(2, b'{"inferq_record": 3}\\n')
warnings.warn("old", stacklevel=1)
sys.stderr.flush()
raise RuntimeError("no room")
"""


def test_records_warnings_foreign_lines_and_the_fault_that_ends_it_are_said_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    process = subprocess.Popen([sys.executable, "-c", RANK], stderr=subprocess.PIPE)
    assert process.stderr is not None
    with caplog.at_level(logging.DEBUG):
        relay(process.stderr, 3)
    assert process.wait(60) == 1
    odd, own, damaged, old, fault = caplog.records
    assert (odd.name, odd.levelname, odd.getMessage()) == (
        "inferq.worker.model",
        "WARNING",
        "rank 3: odd: 7",
    )
    assert own.getMessage() == "rank 3: a library's own words"
    assert damaged.getMessage() == 'rank 3: {"inferq_record": 3}'
    assert "UserWarning: old" in old.getMessage()
    assert (fault.levelname, "RuntimeError: no room" in fault.getMessage()) == ("CRITICAL", True)
