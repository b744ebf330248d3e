"""Section: the engine's decode steps at Llama-3-8B's shape."""

from __future__ import annotations

from collections.abc import Iterable

from gpu.engine_steps import cases_for
from gpu.random_model import LLAMA_8B
from gpu.section import Case, Settings


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases."""
    return cases_for(LLAMA_8B, settings)
