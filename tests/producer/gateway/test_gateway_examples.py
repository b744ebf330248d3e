"""The examples for a gateway run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.model

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
ANSWER = "The capital of France is Paris, which lies on the Seine."


@pytest.mark.parametrize("name", ["gateway_chat.py", "gateway_resume.py"])
def test_the_example_runs(gateway: Any, stand_in_worker: Any, name: str) -> None:
    stand_in_worker.say(ANSWER)
    stand_in_worker.slow_down(0.02)
    run = subprocess.run(
        [sys.executable, "-P", str(EXAMPLES / name)],
        env={**os.environ, "OPENAI_BASE_URL": f"{gateway.url}/v1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    if name == "gateway_chat.py":
        assert run.stdout.startswith(f"{ANSWER}\n")
        assert run.stdout.endswith(" tokens\n")
    else:
        before, cut, after = run.stdout.partition("|")
        assert before
        assert cut
        assert after.strip()
        assert before + after == f"{ANSWER}\n"
