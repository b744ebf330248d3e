"""What an engine's steps came to, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from inferq.runtime.histogram import Histogram

#: Bounds of what passes between two tokens, and of a step, in seconds.
STEPS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0),
)
STEP_TOKENS: Final = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SEQUENCES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(slots=True)
class StepBooks:
    """The engine's steps by their duration, tokens and sequences."""

    duration_s: Histogram = field(default_factory=lambda: Histogram(STEPS_S))
    tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    sequences: Histogram = field(default_factory=lambda: Histogram(STEP_SEQUENCES))

    def took(self, steps: Iterable[tuple[float, int, int]]) -> None:
        """Count steps, each with its seconds, tokens and sequences."""
        for duration_s, tokens, sequences in steps:
            self.duration_s.observe(duration_s)
            self.tokens.observe(tokens)
            self.sequences.observe(sequences)
