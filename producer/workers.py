"""The workers of a queue, as their last reports tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from inferq.producer.server import RedisServer
from inferq.protocol.scripts import QueueScripts

#: Seconds without a report after which a worker counts as gone; by default it reports every 5.
ALIVE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker's last report, `age_s` seconds ago by the server's clock.

    Counts are in KV blocks of `block_size` tokens, and in sequences; `peak_blocks` is the most
    blocks that were ever in use. `prefix_hit_tokens` of `prefix_query_tokens` prompt tokens were
    found in the prefix cache since the worker started. `adapters` are names that jobs may ask for
    as models, beside `model`.
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
        )


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


async def read_workers(server: RedisServer, scripts: QueueScripts) -> list[WorkerInfo]:
    """Return the last report of every worker of one partition, by name."""
    reports = await server.call(scripts.workers)
    seconds, microseconds = await server.call(server.commands.time)
    now_ms = seconds * 1000 + microseconds // 1000
    partition = scripts.keys.partition
    return [WorkerInfo.from_report(n, partition, r, now_ms) for n, r in sorted(reports.items())]
