"""Adapters with random weights, written as PEFT writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def write_adapter(
    folder: Path, model: Path, targets: Sequence[str], *, rank: int, seed: int, **settings: Any
) -> Path:
    """Write an adapter of all the model's projections whose names end with `targets`."""
    generator = torch.Generator().manual_seed(seed)
    is_transposed = json.loads((model / "config.json").read_text())["model_type"] == "gpt2"
    tensors = {}
    with safe_open(model / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            module = name.removesuffix(".weight")
            if module == name or not module.endswith(tuple(f".{target}" for target in targets)):
                continue
            shape = file.get_slice(name).get_shape()
            outputs, inputs = reversed(shape) if is_transposed else shape
            a = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
            b = torch.randn(outputs, rank, generator=generator) / math.sqrt(rank)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.1,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": is_transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
        "use_rslora": False,
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
