"""How long device work takes, and what the device could do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpu.section import Settings

Call = Callable[[], object]

#: Device time spent on one figure, and bounds of its repetitions.
_SECONDS = 0.15
_MIN_REPEATS, _MAX_REPEATS = 5, 100
_COPY_BYTES = 1 << 30
_MATRIX = 8192


def seconds_per_call(calls: Sequence[Call], settings: Settings) -> float:
    """Return the median time of a call, over rounds of all calls one after the other.

    On a GPU they are captured in a graph, so that no launch of the host's is timed. Calls that
    touch different memory keep the caches from answering.
    """
    if settings.device.type == "cpu":
        return _host_seconds(calls) / len(calls)
    return graph_seconds(calls) / len(calls)


def graph_seconds(calls: Sequence[Call]) -> float:
    """Return the median time of a replay of a graph of all calls."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and allocates what must not happen in a capture
        for call in (*calls, *calls[:1]):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    try:
        return _event_seconds(graph.replay)
    finally:
        torch.cuda.synchronize()
        graph.reset()


def _event_seconds(call: Call) -> float:
    for _ in range(2):
        call()
    first = _timed_rounds(call, 2)
    repeats = int(_SECONDS / max(statistics.median(first), 1e-6))
    repeats = max(_MIN_REPEATS, min(_MAX_REPEATS, repeats))
    return statistics.median(_timed_rounds(call, repeats))


def _timed_rounds(call: Call, repeats: int) -> list[float]:
    events = [(_event(), _event()) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_seconds(calls: Sequence[Call]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


def copy_bandwidth(settings: Settings) -> float:
    """Measure bytes per second of a copy on the device, read and written ones counted."""
    size = 1 << 16 if settings.smoke else _COPY_BYTES
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    return 2 * size / seconds_per_call([lambda: target.copy_(source)] * 4, settings)


def matrix_rate(settings: Settings) -> float:
    """Measure operations per second of a bfloat16 matrix product on random data."""
    size = 64 if settings.smoke else _MATRIX
    a, b = (random(settings, size, size) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds_per_call([lambda: torch.mm(a, b, out=out)] * 4, settings)


def random(settings: Settings, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return normal random values on the device: zeros would be faster than real data."""
    return torch.randn(*shape, device=settings.device, dtype=dtype or settings.dtype)
