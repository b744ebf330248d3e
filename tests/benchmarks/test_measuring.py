"""What the benchmarks measure with: profiles, processor time, percentiles."""

from __future__ import annotations

import os
import time

import pytest
from figures import describe, percentile
from load_meter import CpuMeter, LoadMeter
from step_profile import StepProfile
from workloads import Request, Workload

SPIN = "def spin(s):\n    end = clock() + s\n    while clock() < end: pass\n"


def spinner(filename: str):
    """Return a function that is busy for some seconds, in a file of this name."""
    names = {"clock": time.perf_counter}
    exec(compile(SPIN, filename, "exec"), names)
    return names["spin"]


def test_a_profile_books_time_on_the_kind_of_work_that_the_stack_shows() -> None:
    with StepProfile() as profile:
        spinner("/x/worker/model/architecture/linear.py")(0.15)
        spinner("/x/kernels/cpu_attention.py")(0.10)
        spinner("/x/worker/engine/sampling/sampler.py")(0.05)
        spinner("/x/somewhere/else.py")(0.02)
    shares = profile.shares
    assert sum(shares.values()) == pytest.approx(1)
    ranked = sorted(shares, key=lambda kind: -shares[kind])
    assert ranked[:3] == ["matrix products", "attention", "sampling"]
    assert shares["matrix products"] == pytest.approx(0.15 / 0.32, abs=0.12)
    assert "matrix products" in profile.table().splitlines()[0]


def test_a_library_called_from_a_kind_of_work_belongs_to_it() -> None:
    names = {"call": spinner("/y/site-packages/torch/functional.py")}
    exec(compile("def run(s): call(s)", "/x/kernels/norm.py", "exec"), names)
    with StepProfile() as profile:
        names["run"](0.05)
    assert profile.shares["norms, rotary, activations"] > 0.8


def test_meters_see_our_own_work() -> None:
    load, cpu = LoadMeter.start(), CpuMeter({"self": os.getpid()})
    spinner("busy")(0.3)
    assert cpu.seconds()["self"] > 0.02
    figures = load.figures()
    assert 0.05 < figures["own_cores"] < 1.5
    assert figures["foreign_cores"] >= 0


def test_the_figures_of_a_run_come_from_its_tokens_times() -> None:
    work = Workload([Request([1], 3), Request([2], 2)])
    figures = describe("W1", work, [0.0, 1.0], [[1.0, 1.5, 2.0], [2.0, 4.0]])
    assert figures["output_tps"] == pytest.approx(5 / 4)
    assert figures["ttft_p50_ms"] == pytest.approx(1000)
    assert figures["itl_p50_ms"] == pytest.approx(500)
    assert "decode_tps" not in figures
    one = describe("W2", Workload([Request([1], 3)]), [0.0], [[1.0, 1.5, 2.0]])
    assert (one["ttft_ms"], one["decode_tps"]) == (1000.0, 2.0)


def test_a_lost_token_is_an_error_not_a_figure() -> None:
    with pytest.raises(RuntimeError, match="2 tokens came out instead of 3"):
        describe("W1", Workload([Request([1], 3)]), [0.0], [[1.0, 2.0]])


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert percentile([7.0], 0.99) == 7.0
