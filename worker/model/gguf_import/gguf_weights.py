"""The weights and the configuration of a Llama model in a GGUF file, in Hugging Face's form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from inferq.protocol.errors import ModelError
from inferq.worker.model.gguf_import.gguf_file import GgufFile

#: GGUF's name within a block -> Hugging Face's name within a layer.
_LAYER_TENSORS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS: Final = "rope_freqs.weight"
#: The only settings that Llama 3.1 to 3.3 are published with, besides the factor.
_LLAMA3_ROPE: Final = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """The plan of a conversion: `config` as in config.json, and for each Hugging Face name the
    name in the GGUF file and the shape."""

    config: dict[str, Any]
    names: dict[str, str]
    shapes: dict[str, tuple[int, ...]]

    @property
    def num_values(self) -> int:
        """How many numbers all tensors hold together."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())


def plan_weights(gguf: GgufFile) -> LlamaWeights:
    """Work out what to write; raise `ModelError` for anything that we would get wrong.

    Every tensor must have a place in the model, every place a tensor, and every shape must follow
    from the configuration.
    """
    config = _config(gguf)
    shapes = _shapes(config)
    names = _names(config)
    used = {*names.values(), _ROPE_FACTORS}
    for name in gguf.tensors:
        if name not in used:
            raise ModelError(f"{gguf.path}: tensor {name} has no place in a Llama model")
    for name, source in names.items():
        if source not in gguf.tensors:
            raise ModelError(f"{gguf.path}: tensor {source} is missing")
        shape = tuple(int(n) for n in reversed(gguf.tensors[source].shape))
        if shape != shapes[name]:
            raise ModelError(
                f"{gguf.path}: tensor {source} has shape {shape}; the metadata asks for "
                f"{shapes[name]}"
            )
    return LlamaWeights(config, names, shapes)


def read_weights(gguf: GgufFile, plan: LlamaWeights) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor dequantized to float32, in the order of `plan.shapes`, one at a time."""
    heads = plan.config["num_attention_heads"]
    kv_heads = plan.config["num_key_value_heads"]
    for name, source in plan.names.items():
        values = _dequantize(gguf, source)
        if name.endswith("q_proj.weight"):
            values = _half_rotary_rows(values, heads)
        elif name.endswith("k_proj.weight"):
            values = _half_rotary_rows(values, kv_heads)
        yield name, values


def _dequantize(gguf: GgufFile, source: str) -> np.ndarray:
    from gguf.quants import dequantize

    tensor = gguf.tensors[source]
    try:
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except NotImplementedError:
        raise ModelError(
            f"{gguf.path}: tensor {source} has type {tensor.tensor_type.name}, which the "
            "installed gguf package cannot dequantize"
        ) from None


def _half_rotary_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of the rows of a query or key projection [heads * dim, hidden].

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), …; Hugging Face's Llama rotates row i with
    row i + dim / 2.
    """
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _config(gguf: GgufFile) -> dict[str, Any]:
    architecture = gguf.require("general.architecture", str)
    if architecture != "llama":
        raise ModelError(
            f"{gguf.path}: architecture {architecture!r} is not supported; only llama is"
        )
    if gguf.get("llama.expert_count", int):
        raise ModelError(f"{gguf.path}: mixtures of experts are not supported")
    hidden = gguf.require("llama.embedding_length", int)
    heads = gguf.require("llama.attention.head_count", int)
    kv_heads = gguf.get("llama.attention.head_count_kv", int) or heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ModelError(f"{gguf.path}: {heads} heads cannot share {kv_heads} key-value heads")
    head_dim = gguf.get("llama.attention.key_length", int) or hidden // heads
    rotary = gguf.get("llama.rope.dimension_count", int) or head_dim
    if rotary != head_dim or head_dim % 2:
        raise ModelError(
            f"{gguf.path}: rotating {rotary} of {head_dim} dimensions of a head is not supported"
        )
    theta = _shortest(gguf.get("llama.rope.freq_base", float) or 10000.0)
    if "token_embd.weight" not in gguf.tensors:
        raise ModelError(f"{gguf.path}: tensor token_embd.weight is missing")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": gguf.require("llama.feed_forward_length", int),
        "num_hidden_layers": gguf.require("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": gguf.require("llama.context_length", int),
        "rms_norm_eps": _shortest(gguf.require("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(gguf, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "vocab_size": int(gguf.tensors["token_embd.weight"].shape[1]),
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": gguf.get("tokenizer.ggml.eos_token_id", int),
    }


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(gguf: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    if _ROPE_FACTORS in gguf.tensors:
        return _llama3_scaling(gguf, theta, head_dim)
    kind = gguf.get("llama.rope.scaling.type", str) or "none"
    factor = gguf.get("llama.rope.scaling.factor", float)
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return None
    if kind != "linear" or factor is None:
        raise ModelError(f"{gguf.path}: rope scaling {kind!r} is not supported; linear is")
    return {"rope_type": "linear", "factor": _shortest(factor)}


def _llama3_scaling(gguf: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Name the Llama 3 rule whose divisors of the frequencies [head_dim / 2] the file stores."""
    stored = _dequantize(gguf, _ROPE_FACTORS)
    factor = float(stored.max())
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - share) / factor + share)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ModelError(f"{gguf.path}: the factors in {_ROPE_FACTORS} follow no rule we know")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _names(config: dict[str, Any]) -> dict[str, str]:
    names = {"model.embed_tokens.weight": "token_embd.weight"}
    for layer in range(config["num_hidden_layers"]):
        for source, name in _LAYER_TENSORS.items():
            names[f"model.layers.{layer}.{name}.weight"] = f"blk.{layer}.{source}.weight"
    names["model.norm.weight"] = "output_norm.weight"
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = "output.weight"
    return names


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    within_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    outside: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (config["vocab_size"], hidden),
        "model.norm": (hidden,),
        "lm_head": (config["vocab_size"], hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name in _names(config):
        module = name.removesuffix(".weight")
        shapes[name] = outside.get(module) or within_layer[module.split(".", 3)[3]]
    return shapes
