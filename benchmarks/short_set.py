"""The short set behind `make bench`: ours against the last recorded run, and against the peers.

python benchmarks/short_set.py [--record] [--note TEXT] [--workloads FILE] [--model DIR]

Each part is one of the other scripts; their lines go to the standard error output. Takes less than
three minutes on two cores. `--record` keeps the figures in `results/`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from records import Hardware, Record, last_record, peer_records, report

FOLDER = Path(__file__).parent
#: Cores used by others above which figures say nothing.
TOO_BUSY = 0.1

#: The parts: a name for what is special about the run, the script, its arguments.
PARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("", "throughput.py", ("--work", "W2,W1,W3w", "--reps", "1")),
    ("int8", "throughput.py", ("--work", "W2,W1", "--reps", "1", "--quantization", "int8")),
    ("", "queue_cost.py", ("--quick", "--only", "server,workers,latency")),
)


def run(script: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run one script and return its lines; raise `RuntimeError` if it fails."""
    command = [sys.executable, str(FOLDER / script), *arguments]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{script} ended with status {process.returncode}")
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    print("\n".join(lines), file=sys.stderr, flush=True)
    return [json.loads(line) for line in lines]


def figures_of(special: str, lines: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures that are kept of a script's lines, by name."""
    kept: dict[str, float] = {}
    for line in lines:
        if "measurement" in line:
            kept |= _queue_figures(line)
        elif "rep" in line:
            name = ".".join(filter(None, (line["workload"], special)))
            key = "decode_tps" if "decode_tps" in line else "output_tps"
            kept[f"{name}.{key}"] = line[key]
            if line["workload"] == "W4":
                kept |= {f"{name}.{k}": line[k] for k in ("itl_p50_ms", "itl_p99_ms")}
    return kept


def busiest(lines: Iterable[Mapping[str, Any]]) -> float:
    """Return the most cores that others used during any of the runs."""
    return max((line.get("foreign_cores", 0.0) for line in lines), default=0.0)


def _queue_figures(line: Mapping[str, Any]) -> dict[str, float]:
    match line:
        case {"measurement": "server", "readers": True, "workers": 4}:
            return {"queue.server_us_per_token": line["server_us_per_token"]}
        case {"measurement": "workers", "workers": 4}:
            return {"queue.io_us_per_token": line["io_us_per_token"]}
        case {"measurement": "latency"}:
            return {"queue.added_ttft_p50_ms": line["added_ttft_p50_ms"]}
    return {}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all parts and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--record", action="store_true", help="keep the figures in results/")
    parser.add_argument("--note", default="", help="what is to be said about the run")
    parser.add_argument("--workloads", help="passed on")
    parser.add_argument("--model", help="passed on")
    options = parser.parse_args(arguments)
    passed_on = [
        part
        for name in ("workloads", "model")
        if getattr(options, name)
        for part in (f"--{name}", getattr(options, name))
    ]
    kept: dict[str, float] = {}
    lines: list[dict[str, Any]] = []
    for special, script, own in PARTS:
        extra = passed_on if script == "throughput.py" else []
        lines += (part := run(script, [*own, *extra]))
        kept |= figures_of(special, part)
    record = Record.now(kept, options.note)
    print(report(record, last_record(Hardware.here()), peer_records()))
    if (busy := busiest(lines)) > TOO_BUSY:
        print(f"others used up to {busy:.1f} cores meanwhile: these figures say little")
    if options.record:
        print(f"recorded in {record.save()}")


if __name__ == "__main__":
    main()
