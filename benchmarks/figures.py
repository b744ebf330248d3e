"""What is reported of one run of a workload: rates and latencies, one JSON line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from workloads import Workload


def describe(
    name: str, work: Workload, arrivals: Sequence[float], times: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Return the figures of one run.

    `arrivals` has for each request when it was due, `times` when each of its tokens came, both on
    one clock. Raises `RuntimeError` if a token is missing.
    """
    out_tokens = sum(map(len, times))
    expected = sum(request.output_len for request in work.requests)
    if out_tokens != expected:
        raise RuntimeError(f"{name}: {out_tokens} tokens came out instead of {expected}")
    start = min(arrivals)
    seconds = max(emitted[-1] for emitted in times) - start
    ttft = [1e3 * (emitted[0] - at) for emitted, at in zip(times, arrivals, strict=True)]
    gaps = [
        1e3 * (after - before) for emitted in times for before, after in itertools.pairwise(emitted)
    ]
    figures: dict[str, Any] = {
        "workload": name,
        "seconds": seconds,
        "out_tokens": out_tokens,
        "output_tps": out_tokens / seconds,
    }
    if len(times) == 1:
        [emitted] = times
        figures["ttft_ms"] = ttft[0]
        # Tokens that a reader got all at once, from a worker that ran ahead of it, have no rate.
        if emitted[-1] > emitted[0]:
            figures["decode_tps"] = (len(emitted) - 1) / (emitted[-1] - emitted[0])
    figures |= {
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p99_ms": percentile(ttft, 0.99),
    }
    if gaps:
        figures |= {"itl_p50_ms": percentile(gaps, 0.5), "itl_p99_ms": percentile(gaps, 0.99)}
    return figures


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of at least one value, interpolated between neighbours."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def print_line(figures: Mapping[str, Any]) -> None:
    """Print one JSON line."""
    print(json.dumps({key: rounded(value) for key, value in figures.items()}), flush=True)


def rounded(value: Any) -> Any:
    """Return a float with at most three decimals; anything else as it is."""
    return round(value, 3) if isinstance(value, float) else value
