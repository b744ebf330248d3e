"""The workloads that the benchmarks run: greedy, end tokens ignored, an exact number of tokens.

W1: 64 mixed requests at once. W2: one stream. W3w: 32 requests that share a cached prefix of 512
tokens. W4: 60 requests with Poisson arrivals. Token ids are random: their values do not change the
work. `load` reads the same from a file, so that other engines can be given equal requests.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

SEED = 20261129
VOCAB_SIZE = 49_000
PREFIX_LEN = 512


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, the tokens to generate, and the arrival in mean intervals after the start."""

    prompt: list[int]
    output_len: int
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and one that is run before the clock starts (to fill the prefix cache)."""

    requests: list[Request]
    warm: Request | None = None


def generate() -> dict[str, Workload]:
    """Return all workloads, the same at every call."""
    rng = random.Random(SEED)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(20, VOCAB_SIZE) for _ in range(length)]

    def mixed(arrival: float = 0.0) -> Request:
        return Request(prompt(rng.randint(32, 256)), rng.randint(16, 128), arrival)

    prefix = prompt(PREFIX_LEN)
    arrivals, clock = [], 0.0
    for _ in range(60):
        clock += rng.expovariate(1.0)
        arrivals.append(clock)
    return {
        "W1": Workload([mixed() for _ in range(64)]),
        "W2": Workload([Request(prompt(128), 128)]),
        "W3w": Workload(
            [Request(prefix + prompt(16), 32) for _ in range(32)], Request([*prefix, 20], 1)
        ),
        "W4": Workload([mixed(arrival) for arrival in arrivals]),
        "warmup": Workload([Request(prompt(rng.randint(32, 256)), 16) for _ in range(8)]),
    }


def load(path: Path) -> dict[str, Workload]:
    """Read workloads from JSON: name to requests (prompt, output_len, arrival_unit) and warm."""

    def request(entry: dict[str, object]) -> Request:
        return Request(entry["prompt"], entry["output_len"], entry.get("arrival_unit", 0.0))  # type: ignore[arg-type]

    return {
        name: Workload(
            [request(entry) for entry in body["requests"]],
            request(body["warm"]) if "warm" in body else None,
        )
        for name, body in json.loads(path.read_text()).items()
        if isinstance(body, dict) and "requests" in body
    }
