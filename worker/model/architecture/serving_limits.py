"""How long and in what a model can be served, known from its config.json alone."""

from __future__ import annotations

from typing import Final

import torch

from inferq.kernels.attention import HEAD_DIMS
from inferq.protocol.errors import ModelError
from inferq.worker.model.architecture.causal_model import ModelShape

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def served_length(model: ModelShape, asked: int | None) -> int:
    """Return the tokens of the longest request: those asked for, or the model's positions.

    Rotary embeddings may stretch further than the model's own number. Raises `ModelError`, with the
    limit, for more than that.
    """
    limit = model.longest_positions
    if asked is not None and asked > limit:
        raise ModelError(
            f"{asked} is more than the model's {limit} positions", field="max_model_len"
        )
    return asked or model.max_position_embeddings


def served_dtype(name: str, model: ModelShape, device: torch.device) -> torch.dtype:
    """Choose what to compute in: by default the checkpoint's dtype, on the CPU float32.

    CPUs compute in 16 bits only with special instructions, and slowly without. Raises `ModelError`
    for a dtype in which nothing is computed here.
    """
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype or "float32"
    if name not in _DTYPES:
        raise ModelError(
            f"{name!r} is not supported; supported: {', '.join(_DTYPES)}", field="dtype"
        )
    return _DTYPES[name]


def check_triton_heads(model: ModelShape, device: torch.device) -> None:
    """Raise `ModelError` where the GPU's attention has no form for the size of the heads."""
    if model.head_dim not in HEAD_DIMS:
        raise ModelError(
            f"{model.architecture} has heads of {model.head_dim}; on {device} attention takes "
            f"{', '.join(str(size) for size in HEAD_DIMS)}"
        )
