"""Plain facts about a machine and a model, as `diagnosis` finds them; loads nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU that torch sees; sizes in bytes."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What there is to compute with; sizes in bytes.

    `cuda` is the version that torch was built for, None without; `driver_problem` says why torch
    sees no GPU although it was. `compiler` is the first line of its version, `compiler_problem` why
    there is none.
    """

    torch: str
    cuda: str | None
    gpus: tuple[GpuFacts, ...]
    driver_problem: str | None
    has_triton: bool
    compiler: str | None
    compiler_problem: str | None
    memory_bytes: int
    cache_folder: str
    cache_free_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's folder holds; each `…_problem` is why a worker could not use it.

    Without a `folder` and a problem it is a hub id, which only a worker looks up.
    """

    folder: str | None
    architecture: str | None = None
    is_native: bool = False
    max_model_len: int | None = None
    weight_bytes: int | None = None
    has_chat_template: bool = False
    config_problem: str | None = None
    weights_problem: str | None = None
    are_pickles: bool = False
    tokenizer_problem: str | None = None
    #: Why a hub id may be a packaged model that is misspelt.
    name_problem: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All of them; `model` is None where none was asked for."""

    machine: MachineFacts
    model: ModelFacts | None

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `diagnosis` printed."""
        found: Mapping[str, Any] = json.loads(text)
        machine, model = dict(found["machine"]), found["model"]
        machine["gpus"] = tuple(
            GpuFacts(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in machine["gpus"]
        )
        return cls(MachineFacts(**machine), None if model is None else ModelFacts(**model))
