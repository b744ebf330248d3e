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

from gpu.random_model import (
    LoadedEngine,
    RandomWeights,
    engine_of,
    fitting_blocks,
    random_prompt,
    request,
    shape,
)
from gpu.records import Quantity, Record
from gpu.section import Case, Settings
from gpu.timing import copy_bandwidth

MODES: Final[Mapping[str, Mapping[str, bool]]] = {
    "graphs, overlap": {"enforce_eager": False, "async_scheduling": True},
    "graphs, no overlap": {"enforce_eager": False, "async_scheduling": False},
    "eager, no overlap": {"enforce_eager": True, "async_scheduling": False},
}
_BATCHES: Final = (1, 8, 64, 256)
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
    """Time growing batches, then profile shrinking ones: each prompt is computed once."""
    batches = (1, 4) if settings.smoke else _BATCHES
    context = 8 if settings.smoke else _CONTEXT
    timed = 3 if settings.smoke else _TIMED_STEPS
    bandwidth = copy_bandwidth(settings)
    with _profiler(settings):  # its start takes seconds, and must come before any graph
        torch.ones(8, device=settings.device).sum().item()
    weights = RandomWeights()
    room = context + 3 * len(batches) * (_WARM_STEPS + timed + _PROFILED_STEPS) + 64
    config = shape(full, settings)
    started = time.perf_counter()
    with engine_of(
        config,
        weights,
        settings,
        max_model_len=room,
        max_num_seqs=max(batches),
        max_num_batched_tokens=8192,
        num_kv_blocks=fitting_blocks(config, max(batches) * -(-room // 16), settings),
        **options,
    ) as loaded:
        loading = time.perf_counter() - started
        yield Record(
            f"{name}: start",
            {
                "loading": Quantity(loading, "s"),
                "weights_read_each_step": Quantity(weights.bytes_read / 1e9, "GB"),
            },
        )
        steps: dict[int, float] = {}
        for batch in batches:
            _fill(loaded, batch, context, room)
            _step(loaded, _WARM_STEPS)
            times = _step(loaded, timed)
            steps[batch] = statistics.median(times)
            yield _timed(name, batch, times, loaded, weights.bytes_read / bandwidth, bandwidth)
        for batch in reversed(batches):
            if settings.seconds_left <= 0:
                break
            for index in range(batch, max(batches)):
                loaded.engine.abort(str(index))
            _step(loaded, _WARM_STEPS)
            yield _profile(f"{name}: batch {batch}, profile", loaded, steps[batch], settings)


def _timed(
    name: str,
    batch: int,
    times: list[float],
    loaded: LoadedEngine,
    weights_seconds: float,
    bandwidth: float,
) -> Record:
    live = loaded.engine.live_sequences()
    tokens = sum(sequence.num_computed_tokens for sequence in live)
    floor = weights_seconds + tokens * loaded.kv_token_bytes / bandwidth
    step = statistics.median(times)
    return Record(
        f"{name}: batch {batch}",
        {
            "step": Quantity(step * 1e3, "ms"),
            "floor": Quantity(floor * 1e3, "ms"),
            "share": Quantity(floor / step, "of the bandwidth's floor"),
            "throughput": Quantity(batch / step, "tokens/s"),
            "slowest": Quantity(max(times) * 1e3, "ms"),
            "context": Quantity(tokens / batch, "tokens, mean"),
        },
    )


def _fill(loaded: LoadedEngine, batch: int, context: int, room: int) -> None:
    """Add requests up to a batch and compute their prompts."""
    waited = set()
    for index in range(len(loaded.engine.live_sequences()), batch):
        prompt = random_prompt(random.Random(index), context, loaded.config["vocab_size"])
        loaded.engine.add_request(request(str(index), prompt, room - context))
        waited.add(str(index))
    while waited:
        for output in loaded.engine.step():
            if output.error is not None:
                raise RuntimeError(str(output.error))
            waited.discard(output.request_id)


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
    with _profiler(settings) as profiler:
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


def _profiler(settings: Settings) -> profile:
    on_gpu = settings.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    return profile(activities=[activity], acc_events=True)


def _kind(kernel: str) -> str:
    for kind, words in _KINDS.items():
        if any(word.lower() in kernel.lower() for word in words):
            return kind
    return "memcpy" if kernel.startswith("Mem") else "other"
