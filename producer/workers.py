"""The workers of a queue, as their last reports tell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from inferq.producer.server import RedisServer
from inferq.protocol.scripts import QueueScripts

#: Seconds without a report after which a worker counts as gone; by default it reports every 5.
ALIVE_S: Final = 30.0
#: Reports of a worker that may be missed before it counts as late, and the least wait in seconds.
LATE_REPORTS: Final = 3
LATE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker's last report, `age_s` seconds ago by the server's clock.

    Counts are in KV blocks of `block_size` tokens, and in sequences; `peak_blocks` is the most
    blocks that were ever in use. `prefix_hit_tokens` of `prefix_query_tokens` prompt tokens were
    found in the prefix cache since the worker started, and `prompt_tokens` and `generated_tokens`
    are all since then; `prompt_rate` and `generated_rate` are in tokens per second, between its
    last two reports. `report_interval_s` is when it will report next; 0: not known. `adapters` are
    names that jobs may ask for as models, beside `model`.
    """

    name: str
    partition: int
    model: str
    version: str
    age_s: float
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    peak_blocks: int
    block_size: int
    max_model_len: int
    running: int
    waiting: int
    swapped: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    adapters: tuple[str, ...] = ()
    swap_blocks: int = 0
    used_swap_blocks: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prompt_rate: float = 0.0
    generated_rate: float = 0.0
    report_interval_s: float = 0.0
    is_draining: bool = False

    @property
    def state(self) -> str:
        """`serving`, `draining`, `late` (reports are missing) or `gone` (for 30 seconds)."""
        if not self.is_alive:
            return "gone"
        interval_s = self.report_interval_s
        if interval_s and self.age_s > max(LATE_S, LATE_REPORTS * interval_s):
            return "late"
        return "draining" if self.is_draining else "serving"

    @property
    def is_reporting(self) -> bool:
        """Whether its rates are those of now."""
        return self.state in ("serving", "draining")

    @property
    def is_alive(self) -> bool:
        """Whether the worker has reported within the last 30 seconds."""
        return self.age_s <= ALIVE_S

    @classmethod
    def from_report(
        cls, name: str, partition: int, report: Mapping[str, Any], now_ms: int
    ) -> WorkerInfo:
        """Build from a report; what an older worker does not tell is 0."""

        def count(key: str) -> int:
            value = report.get(key, 0)
            return value if isinstance(value, int) else 0

        prompt_rate, generated_rate = _rates(report.get("rates"))

        return cls(
            name=name,
            partition=partition,
            model=str(report.get("model", "")),
            version=str(report.get("version", "")),
            age_s=max(0, now_ms - count("t")) / 1000,
            total_blocks=count("blocks"),
            free_blocks=count("free"),
            cached_blocks=count("cached"),
            peak_blocks=count("peak"),
            block_size=count("block_size"),
            max_model_len=count("max_model_len"),
            running=count("running"),
            waiting=count("waiting"),
            swapped=count("swapped"),
            preemptions=count("preemptions"),
            prefix_query_tokens=count("prefix_queries"),
            prefix_hit_tokens=count("prefix_hits"),
            adapters=_names(report.get("adapters")),
            swap_blocks=count("swap_blocks"),
            used_swap_blocks=count("swap_blocks_used"),
            prompt_tokens=count("prompt_tokens"),
            generated_tokens=count("generated_tokens"),
            prompt_rate=prompt_rate,
            generated_rate=generated_rate,
            report_interval_s=count("every") / 1000,
            is_draining=report.get("draining") is True,
        )


def _rates(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        return 0.0, 0.0
    prompt, generated = (_rate(each) for each in value)
    return prompt, generated


def _rate(value: Any) -> float:
    is_rate = isinstance(value, int | float) and math.isfinite(value) and value >= 0
    return float(value) if is_rate else 0.0


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


async def read_workers(server: RedisServer, scripts: QueueScripts) -> list[WorkerInfo]:
    """Return the last report of every worker of one partition, by name."""
    reports = await server.call(scripts.workers)
    seconds, microseconds = await server.call(server.commands.time)
    now_ms = seconds * 1000 + microseconds // 1000
    partition = scripts.keys.partition
    return [WorkerInfo.from_report(n, partition, r, now_ms) for n, r in sorted(reports.items())]
