"""The sections, their order and the seconds that each may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Status of a section's process that lost its device: the rest goes to a new one.
EXIT_DEVICE_LOST: Final = 3

#: From the start of `run.sh` to its end, whatever happens.
TOTAL_SECONDS: Final = 455.0


@dataclass(frozen=True, slots=True)
class Section:
    """A module of this package with a function `cases`, run in a process of its own."""

    module: str
    title: str
    #: Seconds that are kept for it; it may take more when those before it took less.
    seconds: float
    #: Seconds without a new line in its records after which it counts as hung.
    stall: float = 40.0
    #: Runs beside its neighbours that say so too: it checks, and measures no time.
    concurrent: bool = False
    #: Processes that share its cases, because they compile one kernel after the other.
    parts: int = 1
    #: On the CPU its kernels run in Triton's interpreter.
    interpreted: bool = True


SECTIONS: Final = (
    Section("environment", "Machine", 25, interpreted=False),
    Section("check_attention", "Correctness: attention", 60, concurrent=True, parts=4),
    Section("check_tiles", "Correctness: tiles to choose from", 60, concurrent=True, parts=4),
    Section("check_rows", "Correctness: norms, rotary, activations, moves", 60, concurrent=True),
    Section("check_matmul", "Correctness: AWQ", 60, concurrent=True, parts=2),
    Section("check_sampling", "Correctness: sampling", 60, concurrent=True, parts=2),
    Section(
        "check_ranks",
        "Correctness: calls between GPUs",
        40,
        concurrent=True,
        interpreted=False,
    ),
    Section("decode_speed", "Decode attention", 50),
    Section("prefill_speed", "Prefill attention", 40),
    Section("row_speed", "Other kernels", 30),
    Section("swap_speed", "Swap", 20, interpreted=False),
    Section("steps_large", "Engine steps, Llama-3-8B shape", 75, interpreted=False),
    Section("steps_small", "Engine steps, Qwen3-0.6B shape", 45, interpreted=False),
    Section("generation", "Generation, Qwen3-0.6B shape", 45, interpreted=False),
    Section("peer", "transformers' continuous batching", 45, interpreted=False),
    Section("tune", "Attention with other tiles", 15),
)
