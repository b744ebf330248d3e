"""What a model is, read from its folder's config.json and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from inferq.protocol.errors import ModelError
from inferq.worker.model.fields import Fields
from inferq.worker.model.rope import RopeConfig

#: Architectures that the decoder computes, each with what transformers assumes where config.json
#: is silent.
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "LlamaForCausalLM": MappingProxyType({"max_position_embeddings": 2048}),
        "MistralForCausalLM": MappingProxyType(
            {
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "sliding_window": 4096,
            }
        ),
    }
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder and the few choices in which families differ."""

    architecture: str
    #: Rows of the embedding and of the head; may be padded beyond the tokenizer's ids.
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    #: Whether the projections around attention, and those of the MLP, add a bias.
    attention_bias: bool
    mlp_bias: bool
    #: Tokens that a token sees, itself included; None sees all before it.
    sliding_window: int | None
    #: The checkpoint's dtype, "float32", "bfloat16" or "float16"; None where config.json is silent.
    dtype: str | None
    #: Ids that end a text: those of config.json and of generation_config.json together.
    eos_token_ids: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """Read `folder`'s config.json; raise `ModelError` naming what is missing or unsupported."""
        fields = Fields(_read_json(folder / "config.json"), "config.json")
        architecture = _architecture(fields)
        fields = fields.with_defaults(FAMILIES[architecture])
        _refuse_unsupported(fields)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise fields.error(
                "num_key_value_heads", f"{kv_heads} does not divide num_attention_heads ({heads})"
            )
        head_dim = _head_dim(fields, hidden, heads)
        context = fields.integer("max_position_embeddings")
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=RopeConfig.from_fields(fields, context),
            max_position_embeddings=context,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            attention_bias=fields.boolean("attention_bias", False),
            mlp_bias=fields.boolean("mlp_bias", False),
            sliding_window=_sliding_window(fields, architecture),
            dtype=_dtype(fields),
            eos_token_ids=_eos_token_ids(fields, folder),
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelError(f"{path.parent} has no {path.name}: it is not a Hugging Face model folder")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content


def _architecture(fields: Fields) -> str:
    names = fields.raw.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise fields.error(
            "architectures", f"names none (model_type is {fields.raw.get('model_type')!r})"
        )
    known = [name for name in names if name in FAMILIES]
    if not known:
        raise fields.error(
            "architectures", f"{names[0]} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return str(known[0])


def _refuse_unsupported(fields: Fields) -> None:
    """Raise for settings that change the computation in a way that we do not follow."""
    if (activation := fields.raw.get("hidden_act", "silu")) != "silu":
        raise fields.error("hidden_act", f"{activation!r} is not supported; supported: 'silu'")
    if (quantization := fields.raw.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise fields.error("quantization_config", f"{method!r} checkpoints are not supported")


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if fields.raw.get("head_dim") is None and hidden % heads:
        raise fields.error(
            "hidden_size", f"{hidden} is no multiple of num_attention_heads ({heads})"
        )
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd: rotary embeddings turn pairs")
    return head_dim


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    if architecture != "MistralForCausalLM" or fields.raw.get("sliding_window") is None:
        return None
    return fields.integer("sliding_window")


def _dtype(fields: Fields) -> str | None:
    name = fields.raw.get("dtype") or fields.raw.get("torch_dtype")
    return None if name is None else str(name).removeprefix("torch.")


def _eos_token_ids(fields: Fields, folder: Path) -> frozenset[int]:
    ids = fields.token_ids("eos_token_id")
    path = folder / "generation_config.json"
    if path.is_file():
        ids |= Fields(_read_json(path), path.name).token_ids("eos_token_id")
    return ids
