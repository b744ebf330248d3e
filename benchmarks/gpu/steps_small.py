"""Section: the engine's decode steps at Qwen3-0.6B's shape, where the host shows most."""

from __future__ import annotations

from collections.abc import Iterable

from gpu.engine_steps import cases_for
from gpu.random_model import QWEN3_06B
from gpu.section import Case, Settings


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases."""
    return cases_for(QWEN3_06B, settings)
