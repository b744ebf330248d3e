"""What an engine is doing, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot between two steps.

    blocks_free + blocks_used = blocks_total; blocks_cached counts the free ones that still hold a
    reusable prefix. Running, waiting and swapped are sequences, so that a request counts as often
    as it has outputs, once it was forked. num_swaps are the preemptions by swap, among
    num_preemptions. The rest counts since the engine was made; prefix tokens are counted when a
    request first runs, not when it resumes after preemption. Computed are the tokens, and the
    sequences, of all steps together.
    """

    num_running: int
    num_waiting: int
    num_swapped: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    swap_blocks_total: int
    swap_blocks_used: int
    num_preemptions: int
    num_swaps: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_steps: int
    computed_tokens: int
    computed_sequences: int

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the prefix cache; 0 before any."""
        return self.prefix_hit_tokens / max(self.prefix_query_tokens, 1)
