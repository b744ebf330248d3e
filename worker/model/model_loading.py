"""Which path computes a model, our decoder or transformers, and its loading."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from inferq.kernels.attention import HEAD_DIMS, attention_ops
from inferq.protocol.errors import ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.causal_model import CausalModel
from inferq.worker.model.config import ModelConfig, read_json
from inferq.worker.model.fallback import load_fallback
from inferq.worker.model.fallback_config import FallbackConfig
from inferq.worker.model.families import FAMILIES
from inferq.worker.model.loader import WeightLoader
from inferq.worker.model.quantization import check_quantized_checkpoint
from inferq.worker.model.transformer import Decoder

_log = logging.getLogger(__name__)


def read_model_config(folder: Path) -> ModelConfig | FallbackConfig:
    """Read `folder`'s config.json, for our decoder where it knows the architecture.

    Raises `ModelError` for a model that neither path can serve.
    """
    names = read_json(folder / "config.json").get("architectures")
    if not names or not isinstance(names, list) or any(name in FAMILIES for name in names):
        return ModelConfig.read(folder)
    return FallbackConfig.read(folder)


def load_model(
    folder: Path,
    model: ModelConfig | FallbackConfig,
    config: EngineConfig,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    load: WeightLoader,
) -> CausalModel:
    """Load a model's weights, those of our decoder by `load`, and log which path it takes."""
    attention = attention_ops(device)
    if attention.name == "triton" and model.head_dim not in HEAD_DIMS:
        raise ModelError(
            f"{model.architecture} has heads of {model.head_dim}; on {device} attention takes "
            f"{', '.join(str(size) for size in HEAD_DIMS)}"
        )
    quantization = config.quantization
    loaded: CausalModel
    with torch.inference_mode():
        if isinstance(model, ModelConfig):
            check_quantized_checkpoint(model.quantization, config.quantization, device, dtype)
            decoder = Decoder(
                model,
                max_positions=max_model_len,
                dtype=dtype,
                device=device,
                attention=attention,
                quantization=config.quantization,
            )
            load(folder, decoder.weight_groups(), rename=decoder.rename)
            loaded = decoder
            if model.quantization is not None:
                quantization = model.quantization.method
        else:
            if config.quantization is not None:
                raise ModelError(
                    f"{model.architecture} is computed by transformers, whose weights are not "
                    "quantized here",
                    field="quantization",
                )
            loaded = load_fallback(
                folder,
                model,
                max_positions=max_model_len,
                dtype=dtype,
                device=device,
                attention=attention,
            )
    _log.info(
        "%s (%s) from %s: %s%s on %s, attention %s",
        model.architecture,
        "native" if isinstance(loaded, Decoder) else "transformers",
        folder,
        str(dtype).removeprefix("torch."),
        f" with {quantization} weights" if quantization else "",
        device,
        attention.describe(),
    )
    return loaded
