"""Decode steps of the whole engine against the time that their bytes need."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.random_model import LoadedEngine, RandomWeights, engine_of, random_prompt, request, shape
from gpu.records import Quantity, Record
from gpu.section import Case, Settings
from gpu.timing import copy_bandwidth

MODES: Final[Mapping[str, Mapping[str, bool]]] = {
    "graphs, overlap": {"enforce_eager": False, "async_scheduling": True},
    "graphs, no overlap": {"enforce_eager": False, "async_scheduling": False},
    "eager, no overlap": {"enforce_eager": True, "async_scheduling": False},
}
_BATCHES: Final = (256, 64, 8, 1)
_CONTEXT: Final = 512
_WARM_STEPS, _TIMED_STEPS, _PROFILED_STEPS = 6, 40, 6
#: Words in kernels' names, by what the kernels are for; the first that fits counts.
_KINDS: Final = {
    "attention": ("_decode_kernel", "_reduce_kernel", "_prefill_kernel", "_kv_write"),
    "sampling": ("_highest_kernel", "_draw_kernel", "_choose_kernel", "rank", "gumbel", "noise"),
    "elementwise": ("_rms_norm", "_rotary", "_gate_and_mul"),
    "matrix products": ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitK", "mm"),
}


def cases_for(full: Mapping[str, Any], settings: Settings) -> Iterable[Case]:
    """Give a case for each way of running the engine."""
    for name, options in MODES.items():
        yield Case(name, partial(_measure, name, options, full, settings))


def _measure(
    name: str, options: Mapping[str, bool], full: Mapping[str, Any], settings: Settings
) -> Iterator[Record]:
    """Start with the largest batch; abort down to the smaller ones, so that prompts run once."""
    batches = (4, 1) if settings.smoke else _BATCHES
    context = 8 if settings.smoke else _CONTEXT
    timed = 3 if settings.smoke else _TIMED_STEPS
    bandwidth = copy_bandwidth(settings)
    weights = RandomWeights()
    room = context + 2 * len(batches) * (_WARM_STEPS + timed + _PROFILED_STEPS) + 64
    started = time.perf_counter()
    with engine_of(
        shape(full, settings),
        weights,
        settings,
        max_model_len=room,
        max_num_seqs=max(batches),
        max_num_batched_tokens=8192,
        num_kv_blocks=max(batches) * (-(-room // 16)),
        **options,
    ) as loaded:
        loading = time.perf_counter() - started
        started = time.perf_counter()
        running = _fill(loaded, max(batches), context, room)
        filling = time.perf_counter() - started
        yield Record(
            f"{name}: start",
            {
                "loading": Quantity(loading, "s"),
                "prompts": Quantity(max(batches) * context / filling, "tokens/s"),
                "weights_read_each_step": Quantity(weights.bytes_read / 1e9, "GB"),
            },
        )
        for batch in batches:
            for request_id in running[batch:]:
                loaded.engine.abort(request_id)
            del running[batch:]
            _step(loaded, _WARM_STEPS)
            times = _step(loaded, timed)
            live = loaded.engine.live_sequences()
            tokens = sum(sequence.num_computed_tokens for sequence in live)
            floor = (weights.bytes_read + tokens * loaded.kv_token_bytes) / bandwidth
            step = statistics.median(times)
            yield Record(
                f"{name}: batch {batch}",
                {
                    "step": Quantity(step * 1e3, "ms"),
                    "floor": Quantity(floor * 1e3, "ms"),
                    "share": Quantity(floor / step, "of the bandwidth's floor"),
                    "throughput": Quantity(batch / step, "tokens/s"),
                    "slowest": Quantity(max(times) * 1e3, "ms"),
                },
            )
            if settings.seconds_left > 0:
                yield _profile(f"{name}: batch {batch}, profile", loaded, step, settings)


def _fill(loaded: LoadedEngine, batch: int, context: int, room: int) -> list[str]:
    """Add requests and compute their prompts."""
    rng = random.Random(0)
    names = [str(index) for index in range(batch)]
    for name in names:
        prompt = random_prompt(rng, context, loaded.config["vocab_size"])
        loaded.engine.add_request(request(name, prompt, room - context))
    seen: set[str] = set()
    while len(seen) < batch:
        for output in loaded.engine.step():
            if output.error is not None:
                raise RuntimeError(str(output.error))
            seen.add(output.request_id)
    return names


def _step(loaded: LoadedEngine, steps: int) -> list[float]:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        loaded.engine.step()
        times.append(time.perf_counter() - start)
    return times


def _profile(name: str, loaded: LoadedEngine, step: float, settings: Settings) -> Record:
    """Say for what part of a step the device was busy, and with what."""
    on_gpu = settings.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiler:
        _step(loaded, _PROFILED_STEPS)
        if on_gpu:
            torch.cuda.synchronize()
    busy: dict[str, float] = {}
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if microseconds:
            kind = _kind(event.key)
            busy[kind] = busy.get(kind, 0.0) + microseconds / 1e6 / _PROFILED_STEPS
    total = sum(busy.values())
    shares = {kind: Quantity(spent * 1e3, "ms") for kind, spent in sorted(busy.items())}
    return Record(
        name,
        {
            "device_busy": Quantity(total * 1e3, "ms"),
            "device_idle": Quantity(max(0.0, step - total) * 1e3, "ms"),
            **shares,
        },
    )


def _kind(kernel: str) -> str:
    for kind, words in _KINDS.items():
        if any(word.lower() in kernel.lower() for word in words):
            return kind
    return "memcpy" if kernel.startswith("Mem") else "other"
