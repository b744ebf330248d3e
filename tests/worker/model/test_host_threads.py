"""The environment that torch's threads start with."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from inferq.worker.model.running.host_threads import share_cores
share_cores()
assert "torch" not in sys.modules, "too late: torch has read its environment"
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_that_wait_sleep_soon_unless_the_user_says_otherwise(
    given: dict[str, str], expected: str
) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**kept, **given}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == expected
