"""Runs tests/kernels/interpreter in a process where Triton interprets its kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = sorted(path.name for path in (Path(__file__).parent / "interpreter").glob("test_*"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", INTERPRETED)
def test_kernels_agree_with_the_reference_in_the_interpreter(name):
    pytest.importorskip("triton")
    folder = Path(__file__).parent / "interpreter"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / name)],
        cwd=folder.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
