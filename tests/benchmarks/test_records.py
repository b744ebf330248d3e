"""Records: what is kept of a run, and what it is compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import records
import short_set
from records import Hardware, Record, last_record, peer_records, ratios, report

HERE = Hardware("Some CPU", 2, "avx2")
ELSEWHERE = replace(HERE, cores=64)


def record(date: str, hardware: Hardware = HERE, **figures: float) -> Record:
    named = {name.replace("__", "."): value for name, value in figures.items()}
    return Record("inferq", date, hardware, named)


def test_the_last_record_of_the_same_hardware_is_found(tmp_path: Path) -> None:
    assert last_record(HERE, tmp_path) is None
    newest = record("2026-11-03T00:00", W1__output_tps=120.0)
    for each in (
        record("2026-11-01T00:00", W1__output_tps=100.0),
        newest,
        record("2026-11-02T00:00", W1__output_tps=110.0),
        record("2026-11-09T00:00", ELSEWHERE, W1__output_tps=999.0),
    ):
        each.save(tmp_path)
    (tmp_path / records.PEERS).write_text("[]")
    assert last_record(HERE, tmp_path) == newest
    assert peer_records(tmp_path) == []


@pytest.mark.parametrize(
    ("figure", "ours", "theirs", "better"),
    [
        ("W1.output_tps", 120.0, 100.0, 1.2),
        ("W4.itl_p99_ms", 200.0, 500.0, 2.5),
        ("queue.io_us_per_token", 40.0, 20.0, 0.5),
        ("queue.stream_bytes", 10.0, 20.0, 2.0),
    ],
)
def test_a_ratio_above_one_is_better_for_us_in_either_direction(
    figure: str, ours: float, theirs: float, better: float
) -> None:
    mine = Record("inferq", "now", HERE, {figure: ours})
    [ratio] = ratios(mine, [Record("peer", "then", HERE, {figure: theirs})])
    assert ratio.value == pytest.approx(better)
    assert ratio.is_same_hardware


def test_a_special_run_is_compared_with_a_peers_plain_one_unless_it_has_an_equal() -> None:
    mine = Record("inferq", "now", HERE, {"W1.int8.output_tps": 200.0})
    plain = Record("plain", "then", HERE, {"W1.output_tps": 100.0})
    equal = Record("equal", "then", HERE, {"W1.output_tps": 1.0, "W1.int8.output_tps": 50.0})
    other = Record("other", "then", HERE, {"W2.decode_tps": 1.0})
    found = {ratio.subject: ratio.value for ratio in ratios(mine, [plain, equal, other])}
    assert found == {"plain": 2.0, "equal": 4.0}


def test_the_report_says_which_ratios_are_across_hardware() -> None:
    mine = record("2026-11-03T00:00", W1__output_tps=120.0)
    last = record("2026-11-01T00:00", W1__output_tps=100.0)
    peer = Record("Peer", "2026-10-01", ELSEWHERE, {"W1.output_tps": 60.0})
    text = report(mine, last, [peer])
    assert "1.20 x last, 2.00 x Peer (other hardware)" in text
    assert "no run is recorded" not in text
    assert "no run is recorded" in report(mine, None, [peer])


def test_this_machine_can_be_described_and_kept(tmp_path: Path) -> None:
    now = Record.now({"W1.output_tps": 1.0}, "a note")
    now.save(tmp_path)
    assert now.hardware == Hardware.here()
    assert last_record(now.hardware, tmp_path) == now


def test_all_records_of_the_repository_can_be_read() -> None:
    assert {"W1.output_tps", "W2.decode_tps"} <= set(peer_records()[0].figures)
    last_record(HERE)


def test_the_short_set_keeps_one_figure_of_each_run() -> None:
    lines = [
        {"rep": 0, "workload": "W2", "output_tps": 25.0, "decode_tps": 27.0, "foreign_cores": 0.2},
        {"rep": 0, "workload": "W1", "output_tps": 150.0},
        {"workload": "W1", "median_of": 1, "output_tps": 1.0},
        {"measurement": "latency", "added_ttft_p50_ms": 3.0},
        {"measurement": "script", "queued": 1},
    ]
    assert short_set.figures_of("", lines) == {
        "W2.decode_tps": 27.0,
        "W1.output_tps": 150.0,
        "queue.added_ttft_p50_ms": 3.0,
    }
    assert list(short_set.figures_of("int8", lines[:2])) == [
        "W2.int8.decode_tps",
        "W1.int8.output_tps",
    ]
    assert short_set.busiest(lines) == 0.2
