"""The families of models that the decoder computes, each as its differences from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What a checkpoint calls its tensors, without `.weight` and `.bias`; None: it has none.

    Those of a layer follow `layer`. Several names in a tuple are projections that stand one below
    the other in one fused matrix of ours; a checkpoint that has them fused gives one name.
    """

    #: Prefix of all but the head, which exports of the bare model leave out.
    model: str = "model."
    embedding: str = "embed_tokens"
    positions: str | None = None
    final_norm: str = "norm"
    head: str = "lm_head"
    layer: str = "layers."
    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str | None = None
    key_norm: str | None = None
    attention_output: str = "self_attn.o_proj"
    attention_post_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    #: Gate and up of a gated MLP; the only inner projection of one without a gate.
    mlp_input: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_output: str = "mlp.down_proj"
    mlp_post_norm: str | None = None
    #: Ends of names, and prefixes, of tensors that a checkpoint may hold and nobody reads.
    ignored_ends: tuple[str, ...] = ("rotary_emb.inv_freq",)
    ignored_prefixes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one family computes differently; the defaults are Llama's."""

    names: TensorNames = TensorNames()
    #: What transformers assumes where config.json is silent.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    #: Our name of a setting -> config.json's, where they differ.
    settings: Mapping[str, str] = field(default_factory=dict)
    #: The object within config.json that describes the text model of a larger one.
    nested: str | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    #: Added to norm weights after loading: Gemma stores them less one.
    norm_offset: float = 0.0
    #: A gate multiplies the MLP's inner row.
    gated: bool = True
    #: Activations of other names that a checkpoint means.
    activation_aliases: Mapping[str, str] = field(default_factory=dict)
    #: Embeddings are multiplied with the root of hidden_size.
    scales_embeddings: bool = False
    #: Rows before position 0 in a table of learned positions; None: rotary embeddings.
    position_offset: int | None = None
    #: Weights are stored [inputs, outputs].
    transposed: bool = False
    #: The setting that switches biases of projections on, or that they always or never have one.
    qkv_bias: str | bool = "attention_bias"
    output_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    #: Which layers see a window: none; all; those from max_window_layers on; all but each n-th.
    #: A list `layer_types` in config.json comes before the last two.
    windows: Literal["none", "all", "upper"] | int = "none"
    #: Layers with a window turn by rotary embeddings of their own.
    has_local_rope: bool = False
    rope_theta: float = 10000.0
    #: Attention scores are divided by the root of query_pre_attn_scalar, not of head_dim.
    scales_queries: bool = False
    #: Settings of which only this value is computed.
    fixed: Mapping[str, Any] = field(default_factory=dict)


_LLAMA: Final = Family(defaults={"max_position_embeddings": 2048}, mlp_bias="mlp_bias")

_MISTRAL: Final = Family(
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    qkv_bias=False,
    output_bias=False,
    windows="all",
)

_QWEN_DEFAULTS: Final = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_QWEN2: Final = Family(defaults=_QWEN_DEFAULTS, qkv_bias=True, output_bias=False, windows="upper")

_QWEN3: Final = Family(
    names=TensorNames(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
    defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    windows="upper",
)

_PHI3: Final = Family(
    names=TensorNames(qkv=("self_attn.qkv_proj",), mlp_input=("mlp.gate_up_proj",)),
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    qkv_bias=False,
    output_bias=False,
    windows="all",
)

_GEMMA: Final = Family(
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    norm_offset=1.0,
    activation_aliases={"gelu": "gelu_pytorch_tanh"},
    scales_embeddings=True,
)

_GEMMA2: Final = replace(
    _GEMMA,
    names=TensorNames(
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    settings={"hidden_act": "hidden_activation"},
    activation_aliases={},
    windows=2,
    scales_queries=True,
    fixed={"use_bidirectional_attention": False},
)

_GEMMA3: Final = replace(
    _GEMMA2,
    names=replace(_GEMMA2.names, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
    defaults={
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    windows=6,
    has_local_rope=True,
    rope_theta=1e6,
)

#: The text model of Gemma 3's larger sizes, which also see images.
_GEMMA3_MULTIMODAL: Final = replace(
    _GEMMA3,
    names=replace(
        _GEMMA3.names,
        model="language_model.model.",
        head="language_model.lm_head",
        ignored_prefixes=("vision_tower.", "multi_modal_projector."),
    ),
    nested="text_config",
)

_GPT2: Final = Family(
    names=TensorNames(
        model="transformer.",
        embedding="wte",
        positions="wpe",
        final_norm="ln_f",
        layer="h.",
        input_norm="ln_1",
        qkv=("attn.c_attn",),
        attention_output="attn.c_proj",
        mlp_norm="ln_2",
        mlp_input=("mlp.c_fc",),
        mlp_output="mlp.c_proj",
        ignored_ends=(".attn.bias", ".attn.masked_bias"),
    ),
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    settings={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "hidden_act": "activation_function",
        "norm_eps": "layer_norm_epsilon",
    },
    norm="layer",
    norm_eps=1e-5,
    gated=False,
    position_offset=0,
    transposed=True,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
)

_OPT: Final = Family(
    names=TensorNames(
        model="model.decoder.",
        positions="embed_positions",
        final_norm="final_layer_norm",
        input_norm="self_attn_layer_norm",
        attention_output="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        mlp_input=("fc1",),
        mlp_output="fc2",
    ),
    defaults={
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "enable_bias": True,
        "tie_word_embeddings": True,
    },
    settings={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    norm="layer",
    norm_eps=1e-5,
    gated=False,
    position_offset=2,
    qkv_bias="enable_bias",
    output_bias="enable_bias",
    mlp_bias="enable_bias",
    # Of the published models only OPT-350m differs in these.
    fixed={
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
    },
)

#: Architectures, as config.json names them, that the decoder computes.
FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": _MISTRAL,
        "Qwen2ForCausalLM": _QWEN2,
        "Qwen3ForCausalLM": _QWEN3,
        "Phi3ForCausalLM": _PHI3,
        "GemmaForCausalLM": _GEMMA,
        "Gemma2ForCausalLM": _GEMMA2,
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3ForConditionalGeneration": _GEMMA3_MULTIMODAL,
        "GPT2LMHeadModel": _GPT2,
        "OPTForCausalLM": _OPT,
    }
)
