"""What an engine is doing, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot between two steps.

    blocks_free + blocks_used = blocks_total; blocks_cached counts the free ones that still hold a
    reusable prefix. The rest counts since the engine was made; prefix tokens are counted when a
    request first runs, not when it resumes after preemption.
    """

    num_running: int
    num_waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_steps: int
