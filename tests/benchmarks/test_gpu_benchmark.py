"""The GPU benchmark without a GPU: every line that can run does, and it always ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"

FAKE = """
import os, time
from gpu.records import Quantity, Record, Target
from gpu.section import Case, each

def cases(settings):
    yield each("good", lambda: Record("good", {"x": Quantity(0.9, "of y")}, Target("x", 0.85)))
    yield each("short", lambda: Record("short", {"x": Quantity(0.8)}, Target("x", 0.85)))
    yield each("raises", lambda: {}["key"])
    yield each("dies", lambda: os._exit(7))
    yield each("hangs", lambda: time.sleep(1000))
    yield each("after", lambda: Record("after", {"x": Quantity(1, "s")}))
"""


def smoke(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Run the script; all it reports must have worked."""
    done = subprocess.run(
        [FOLDER / "run.sh", "--smoke", "--out", tmp_path, *options],
        env={**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,  # it finds its own way
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    return results


def test_sections_run_from_the_checkout_alone(tmp_path: Path) -> None:
    modules = ["environment", "check_rows", "check_ranks", "decode_speed", "swap_speed"]
    results = smoke(tmp_path, "--only", ",".join(modules))
    assert list(results["sections"]) == modules
    for section in results["sections"].values():
        assert section["records"]
        assert {record["status"] for record in section["records"]} <= {"met", "measured"}
    decode = results["sections"]["decode_speed"]["records"][0]
    assert decode["case"] == "batch 1, context 24"
    assert decode["quantities"]["share"]["unit"] == "of copy bandwidth"
    table = (tmp_path / "results.md").read_text()
    assert "| Decode attention | batch 1, context 24 | time " in table
    assert len(results["sources_sha256"]) == 64


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_section_runs(tmp_path: Path) -> None:
    from gpu.plan import SECTIONS

    results = smoke(tmp_path)
    assert len(results["sections"]) == len(SECTIONS)
    assert results["seconds"] < 400


@pytest.fixture
def fake_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package with one more section, on the path of this process and its children."""
    package = tmp_path / "path" / "gpu"
    package.mkdir(parents=True)
    for path in FOLDER.glob("*.py"):
        (package / path.name).symlink_to(path)
    (package / "fake.py").write_text(FAKE)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return package


@pytest.mark.timeout(240)  # three processes import torch, on a busy machine slowly
@pytest.mark.usefixtures("fake_section")
def test_a_section_that_dies_or_hangs_goes_on_with_its_next_case(tmp_path: Path) -> None:
    from gpu.plan import Section
    from gpu.worker import SectionWorker

    worker = SectionWorker(Section("fake", "Fake", 60, stall=1.5), tmp_path, smoke=True)
    worker.start()
    worker.go(time.monotonic() + 200)
    while worker.poll():
        time.sleep(0.05)
    records = {record["case"]: record for record in worker.records()}
    assert {case: record["status"] for case, record in records.items()} == {
        "good": "met",
        "short": "missed",
        "raises": "failed",
        "dies": "failed",
        "hangs": "failed",
        "after": "measured",
    }
    assert "KeyError: 'key'" in records["raises"]["error"]
    assert "ended with 7" in records["dies"]["error"]
    assert "hung" in records["hangs"]["error"]


@pytest.mark.usefixtures("fake_section")
def test_a_section_ends_with_its_time(tmp_path: Path) -> None:
    from gpu.plan import Section
    from gpu.worker import SectionWorker

    worker = SectionWorker(Section("fake", "Fake", 60, stall=1000), tmp_path, smoke=True)
    worker.start()
    began = time.monotonic()
    worker.go(began + 1)
    while worker.poll():
        time.sleep(0.05)
    assert time.monotonic() - began < 5
    assert any("the time was used up" in record["error"] for record in worker.records())


class FakeDevice:
    """A device whose clock moves by what runs on it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, seconds: float) -> None:
        self.seconds += seconds

    def event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    def graph(self) -> FakeGraph:
        return FakeGraph(self)


class FakeEvent:
    """A CUDA event that reads the device's clock."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._at = float("nan")

    def record(self) -> None:
        self._at = self._device.seconds

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (other._at - self._at)


class FakeGraph:
    """A captured graph whose replay takes 3 ms."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def replay(self) -> None:
        self._device.run(0.003)

    def reset(self) -> None:
        pass


@pytest.mark.usefixtures("fake_section")
def test_device_times_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from gpu.section import Settings
    from gpu.timing import graph_seconds, stream_seconds

    @contextlib.contextmanager
    def entered(_: object) -> Iterator[None]:
        yield

    stream = types.SimpleNamespace(wait_stream=lambda _: None)
    slept: list[int] = []
    device = FakeDevice()
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": entered,
        "synchronize": lambda *_: None,
        "CUDAGraph": device.graph,
        "graph": entered,
        "Event": device.event,
        "_sleep": slept.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    settings = Settings(torch.device("cuda"), smoke=False, deadline=0.0)
    calls: list[str] = []
    # Two rounds to warm up and one in the capture; a replay calls nothing.
    seconds = graph_seconds(lambda: [lambda: calls.append("call")] * 3, settings)
    assert len(calls) == 9
    assert seconds == pytest.approx(0.001)
    assert stream_seconds([lambda: device.run(0.002)] * 2, settings) == pytest.approx(0.002)
    assert slept


def test_the_time_of_all_sections_is_less_than_the_limit() -> None:
    """Each is kept its own part: concurrent ones share the longest of theirs."""
    source = json.loads(
        subprocess.run(
            [sys.executable, "-c", _TIMES],
            env={**os.environ, "PYTHONPATH": str(FOLDER.parent)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    assert source["kept"] <= source["total"] < 8 * 60 - 20


_TIMES = """
import json
from gpu.plan import SECTIONS, TOTAL_SECONDS
together = [section.seconds for section in SECTIONS if section.concurrent]
alone = [section.seconds for section in SECTIONS if not section.concurrent]
print(json.dumps({"kept": sum(alone) + max(together), "total": TOTAL_SECONDS}))
"""
