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
#: Turns of the device's clock that a launch by the host may take: some 250 us.
_CYCLES_PER_CALL = 500_000
_COPY_BYTES = 1 << 30
_MATRIX = 8192


def graph_seconds(make: Callable[[], Sequence[Call]], settings: Settings) -> float:
    """Return the median time of a call, over replays of a graph of all that `make` gives.

    `make` runs inside the capture too, where a plan for captured calls must be made. No launch of
    the host's is timed, and calls that touch different memory keep the caches from answering.
    """
    if settings.device.type == "cpu":
        return _host_seconds(make)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and allocates what must not happen in a capture
        for _ in range(2):
            for call in make():
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls = make()
        for call in calls:
            call()
    try:
        return _median_seconds(graph.replay) / len(calls)
    finally:
        torch.cuda.synchronize()
        graph.reset()


def stream_seconds(calls: Sequence[Call], settings: Settings) -> float:
    """Return the median time of a call, over rounds of calls that no graph can hold.

    The device first waits, so that the host is ahead of it and its launches are not timed.
    """
    if settings.device.type == "cpu":
        return _host_seconds(lambda: calls)

    def round_of_calls() -> None:
        for call in calls:
            call()

    for _ in range(2):
        round_of_calls()
    head_start = len(calls) * _CYCLES_PER_CALL
    return _median_seconds(round_of_calls, head_start=head_start) / len(calls)


def _median_seconds(call: Call, head_start: int = 0) -> float:
    for _ in range(2):
        call()
    first = statistics.median(_timed(call, 2, head_start))
    waited = head_start / 1.5e9
    repeats = int(_SECONDS / max(first + waited, 1e-6))
    repeats = max(_MIN_REPEATS, min(_MAX_REPEATS, repeats))
    return statistics.median(_timed(call, repeats, head_start))


def _timed(call: Call, repeats: int, head_start: int) -> list[float]:
    events = [(_event(), _event()) for _ in range(repeats)]
    for start, end in events:
        if head_start:
            torch.cuda.synchronize()
            torch.cuda._sleep(head_start)  # type: ignore[no-untyped-call]  # noqa: SLF001
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _host_seconds(make: Callable[[], Sequence[Call]]) -> float:
    calls = make()
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls)


def copy_bandwidth(settings: Settings) -> float:
    """Measure bytes per second of a copy on the device, read and written ones counted."""
    size = 1 << 16 if settings.smoke else _COPY_BYTES
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    return 2 * size / stream_seconds([lambda: target.copy_(source)] * 4, settings)


def matrix_rate(settings: Settings) -> float:
    """Measure operations per second of a bfloat16 matrix product on random data."""
    size = 64 if settings.smoke else _MATRIX
    a, b = (normal(settings, size, size) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / stream_seconds([lambda: torch.mm(a, b, out=out)] * 4, settings)


def normal(settings: Settings, *shape: int) -> Tensor:
    """Return normal random values on the device: zeros would be faster than real data."""
    return torch.randn(*shape, device=settings.device, dtype=settings.dtype)
