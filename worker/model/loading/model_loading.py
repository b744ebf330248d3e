"""Which path computes a model, our decoder or transformers, and its loading."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from inferq.kernels.attention import AttentionOps, attention_ops
from inferq.kernels.matmul import can_stay_narrow
from inferq.protocol.errors import ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.architecture.causal_model import CausalModel, ModelShape
from inferq.worker.model.architecture.config import ModelConfig, read_json
from inferq.worker.model.architecture.fallback import load_fallback
from inferq.worker.model.architecture.fallback_config import FallbackConfig
from inferq.worker.model.architecture.families import FAMILIES
from inferq.worker.model.architecture.serving_limits import check_triton_heads
from inferq.worker.model.architecture.transformer import Decoder
from inferq.worker.model.loading.loader import WeightLoader, load_weights, stored_16_bit_dtype
from inferq.worker.model.loading.lora_loading import load_adapters
from inferq.worker.model.loading.quantization import check_quantized_checkpoint
from inferq.worker.model.ranks.parallel import Share
from inferq.worker.model.ranks.parallel_group import RankGroup


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
    """Load a model's weights, those of our decoder by `load`."""
    if isinstance(model, ModelConfig):
        return load_decoder(
            folder,
            model,
            config,
            max_model_len=max_model_len,
            dtype=dtype,
            device=device,
            load=load,
        )
    if config.quantization is not None:
        raise ModelError(
            f"{model.architecture} is computed by transformers, whose weights are not quantized "
            "here",
            field="quantization",
        )
    if config.lora_adapters:
        raise ModelError(
            f"{model.architecture} is computed by transformers, where adapters are not applied",
            field="lora_adapters",
        )
    attention = _attention(model, device)
    with torch.inference_mode():
        return load_fallback(
            folder,
            model,
            max_positions=max_model_len,
            dtype=dtype,
            device=device,
            attention=attention,
        )


def load_decoder(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    load: WeightLoader,
    group: RankGroup | None = None,
) -> Decoder:
    """Load our decoder's weights by `load`, or from the folder's files a rank's share of them.

    `group` need not be connected yet.
    """
    check_quantized_checkpoint(model.quantization, config.quantization, device, dtype)
    attention = _attention(model, device)
    head_dtype = dtype
    if load is load_weights:  # there are files to ask
        head_dtype = _head_dtype(folder, model, config, dtype, device)
    with torch.inference_mode():
        decoder = Decoder(
            model,
            max_positions=max_model_len,
            dtype=dtype,
            device=device,
            attention=attention,
            quantization=config.quantization,
            head_dtype=head_dtype,
            group=group,
        )
        share = None if group is None else Share(model, group.rank, group.size)
        if share is not None:
            load = partial(load_weights, cut=share.cut)
        load(folder, decoder.weight_groups(), rename=decoder.rename)
        if config.lora_adapters:
            load_adapters(
                decoder,
                config.lora_adapters,
                max_rank=config.max_lora_rank,
                dtype=dtype,
                share=share,
            )
    return decoder


def _head_dtype(
    folder: Path,
    model: ModelConfig,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.dtype:
    """Return in what head and embedding are kept: a checkpoint's 16 bits where that is quicker.

    A single sequence reads the whole head for each token, as much as the layers' 4-bit weights.
    """
    if config.quantization == "int8":
        return dtype
    names = model.family.names
    ends = (f"{names.embedding}.weight", f"{names.head}.weight")
    stored = stored_16_bit_dtype(folder, ends)
    return stored if stored and can_stay_narrow(stored, dtype, device) else dtype


def _attention(model: ModelShape, device: torch.device) -> AttentionOps:
    attention = attention_ops(device)
    if attention.name == "triton":
        check_triton_heads(model, device)
    return attention
