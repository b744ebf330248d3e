"""What a model is, read from its folder's config.json and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from inferq.protocol.errors import ModelError
from inferq.worker.model.architecture.families import FAMILIES, Family
from inferq.worker.model.architecture.fields import Fields
from inferq.worker.model.architecture.rope import RopeConfig
from inferq.worker.model.loading.quantization import QuantizedFormat, QuantizedProjection

#: Names of activations -> what is computed. gelu_new and its like are the tanh approximation.
_ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
_GATED_ACTIVATIONS: Final = ("silu", "gelu_tanh")
_PLAIN_ACTIVATIONS: Final = ("gelu_tanh", "gelu", "relu")
_WINDOWED: Final = "sliding_attention"
_LAYER_TYPES: Final = ("full_attention", _WINDOWED)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    #: Tokens that a token sees, itself included; None sees all before it.
    window: int | None
    #: Index into `ModelConfig.ropes`; None where positions are learned.
    rope: int | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a decoder and the choices in which models of a family differ."""

    architecture: str
    family: Family
    #: Rows of the embedding and of the head; may be padded beyond the tokenizer's ids.
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    norm_eps: float
    #: "silu", "gelu_tanh", "gelu" or "relu".
    activation: str
    #: What attention scores are multiplied with, and caps c · tanh(x / c) on scores and logits.
    attention_scale: float
    attention_soft_cap: float | None
    logits_soft_cap: float | None
    #: Positions that the model was made for, and the most that its settings can be stretched to.
    max_position_embeddings: int
    longest_positions: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    #: The checkpoint's dtype, "float32", "bfloat16" or "float16"; None where config.json is silent.
    dtype: str | None
    #: Ids that end a text: those of config.json and of generation_config.json together.
    eos_token_ids: frozenset[int]
    #: How the checkpoint stores the layers' projections; None: as plain weights.
    quantization: QuantizedFormat | None

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def unused_biases(self) -> tuple[str, ...]:
        """Ends of names of biases that GPTQ's packer adds to projections that have none: zeros."""
        if self.quantization is None or self.quantization.method != "gptq":
            return ()
        names = self.family.names
        projections = (
            *(() if self.qkv_bias else names.qkv),
            *(() if self.output_bias else (names.attention_output,)),
            *(() if self.mlp_bias else (*names.mlp_input, names.mlp_output)),
        )
        return tuple(f"{projection}.bias" for projection in projections)

    def quantized(self, layer: int, projections: tuple[str, ...]) -> QuantizedProjection | None:
        """Return how a layer's projections, which are one product, are stored; None: plain."""
        if self.quantization is None:
            return None
        names = self.family.names
        prefix = f"{names.model}{names.layer}{layer}."
        return self.quantization.projection([f"{prefix}{name}" for name in projections])

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """Read `folder`'s config.json; raise `ModelError` naming what is missing or unsupported."""
        whole = Fields(read_json(folder / "config.json"), "config.json")
        architecture = _architecture(whole)
        family = FAMILIES[architecture]
        fields = whole if family.nested is None else whole.inner(family.nested)
        fields = fields.with_defaults(family.defaults).with_names(family.settings)
        _refuse_unsupported(fields, family)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        head_dim = _head_dim(fields, family, hidden, heads)
        context = fields.integer("max_position_embeddings")
        windows = _windows(fields, family)
        ropes = _ropes(fields, family, context, head_dim)
        query_scale = fields.number("query_pre_attn_scalar") if family.scales_queries else head_dim
        return cls(
            architecture=architecture,
            family=family,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=_intermediate_size(fields, family, hidden),
            num_heads=heads,
            num_kv_heads=_num_kv_heads(fields, heads),
            head_dim=head_dim,
            layers=tuple(LayerConfig(window, _rope_of(window, ropes)) for window in windows),
            ropes=ropes,
            norm_eps=_norm_eps(fields, family),
            activation=_activation(fields, family),
            attention_scale=query_scale**-0.5,
            attention_soft_cap=fields.optional_number("attn_logit_softcapping"),
            logits_soft_cap=fields.optional_number("final_logit_softcapping"),
            max_position_embeddings=context,
            longest_positions=max(context, ropes[0].longest if len(ropes) == 1 else 0),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            qkv_bias=_switch(fields, family.qkv_bias),
            output_bias=_switch(fields, family.output_bias),
            mlp_bias=_switch(fields, family.mlp_bias),
            dtype=dtype_of(whole) or dtype_of(fields),
            eos_token_ids=eos_token_ids(whole, fields, folder),
            quantization=_quantization(whole),
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a settings file of a model holds; raise `ModelError` if it is none."""
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


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    """Raise for settings that change the computation in a way that we do not follow."""
    for name, only in family.fixed.items():
        if (value := fields.get(name, only)) != only:
            raise fields.error(name, f"{value!r} is not supported; supported: {only!r}")
    if family.position_offset is not None:
        hidden = fields.integer("hidden_size")
        if (width := fields.integer("word_embed_proj_dim", hidden)) != hidden:
            raise fields.error("word_embed_proj_dim", f"{width} is not hidden_size ({hidden})")


def _quantization(whole: Fields) -> QuantizedFormat | None:
    if whole.get("quantization_config") is None:
        return None
    return QuantizedFormat.read(whole.inner("quantization_config"))


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.error(
            "hidden_size", f"{hidden} is no multiple of num_attention_heads ({heads})"
        )
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2 and family.position_offset is None:
        raise fields.error("head_dim", f"{head_dim} is odd: rotary embeddings turn pairs")
    return head_dim


def _num_kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error(
            "num_key_value_heads", f"{kv_heads} does not divide num_attention_heads ({heads})"
        )
    return kv_heads


def _intermediate_size(fields: Fields, family: Family, hidden: int) -> int:
    # GPT-2's is four times the hidden size unless it says otherwise.
    return fields.integer("intermediate_size", None if family.gated else 4 * hidden)


def _norm_eps(fields: Fields, family: Family) -> float:
    name = "rms_norm_eps" if family.norm == "rms" else "norm_eps"
    return fields.number(name, family.norm_eps)


def _activation(fields: Fields, family: Family) -> str:
    name = str(fields.get("hidden_act", "silu"))
    name = family.activation_aliases.get(name, name)
    computed = _GATED_ACTIVATIONS if family.gated else _PLAIN_ACTIVATIONS
    activation = _ACTIVATIONS.get(name, "")
    if activation not in computed:
        known = [each for each, meaning in _ACTIVATIONS.items() if meaning in computed]
        raise fields.error("hidden_act", f"{name!r} is not supported; supported: {known}")
    return activation


def _switch(fields: Fields, setting: str | bool) -> bool:
    return setting if isinstance(setting, bool) else fields.boolean(setting, False)


def _windows(fields: Fields, family: Family) -> list[int | None]:
    """Return each layer's window."""
    layers = fields.integer("num_hidden_layers")
    if family.windows == "none" or fields.get("sliding_window") is None:
        return [None] * layers
    if family.windows == "upper" and not fields.boolean("use_sliding_window", False):
        return [None] * layers
    window = fields.integer("sliding_window")
    if family.windows == "all":
        return [window] * layers
    return [window if kind == _WINDOWED else None for kind in _layer_types(fields, family, layers)]


def _layer_types(fields: Fields, family: Family, layers: int) -> tuple[str, ...]:
    if types := fields.strings("layer_types"):
        if len(types) != layers:
            raise fields.error("layer_types", f"names {len(types)} layers, not {layers}")
        if unknown := sorted(set(types) - set(_LAYER_TYPES)):
            raise fields.error(
                "layer_types", f"{unknown[0]!r} is not supported; supported: {_LAYER_TYPES}"
            )
        return types
    if isinstance(family.windows, int):
        period = fields.integer("sliding_window_pattern", family.windows)
        return tuple(_LAYER_TYPES[(index + 1) % period != 0] for index in range(layers))
    first = fields.get("max_window_layers", 0)
    return tuple(_LAYER_TYPES[index >= first] for index in range(layers))


def _ropes(fields: Fields, family: Family, context: int, head_dim: int) -> tuple[RopeConfig, ...]:
    """Return the rotary embeddings: none, one, or one for full and one for windowed layers."""
    if family.position_offset is not None:
        return ()
    full, windowed = _LAYER_TYPES if family.has_local_rope else (None, None)
    ropes = [
        RopeConfig.from_fields(fields, context, layer_type=full, default_theta=family.rope_theta)
    ]
    if windowed is not None:
        parameters = fields.get("rope_parameters")
        if isinstance(parameters, dict) and windowed in parameters:
            ropes.append(RopeConfig.from_fields(fields, context, layer_type=windowed))
        else:
            ropes.append(RopeConfig(theta=fields.number("rope_local_base_freq", 10000.0)))
    for rope in ropes:
        rope.check(fields, head_dim)
    return tuple(ropes)


def _rope_of(window: int | None, ropes: tuple[RopeConfig, ...]) -> int | None:
    if not ropes:
        return None
    return int(window is not None and len(ropes) > 1)


def dtype_of(fields: Fields) -> str | None:
    """Return the name of a checkpoint's dtype, None where config.json is silent."""
    name = fields.raw.get("dtype") or fields.raw.get("torch_dtype")
    return None if name is None else str(name).removeprefix("torch.")


def eos_token_ids(whole: Fields, fields: Fields, folder: Path) -> frozenset[int]:
    """Return the ids that end a text: of config.json, its text part, and generation_config.json."""
    ids = whole.token_ids("eos_token_id") | fields.token_ids("eos_token_id")
    path = folder / "generation_config.json"
    if path.is_file():
        ids |= Fields(read_json(path), path.name).token_ids("eos_token_id")
    return ids
