"""What is read from config.json, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inferq.protocol.errors import ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.architecture.vocabulary import tokenizer_vocab_size
from inferq.worker.model.loading import model_loading
from inferq.worker.model.loading.loader import load_weights

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "eos_token_id": 2,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, generation: dict[str, Any] | None = None, **settings: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**BASE, **settings}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.read(folder)


def test_what_config_json_leaves_out_is_what_transformers_assumes(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.max_position_embeddings == 2048
    assert config.norm_eps == 1e-6
    assert [rope.theta for rope in config.ropes] == [10000.0]
    assert not config.tie_word_embeddings
    assert [layer.window for layer in config.layers] == [None] * 3
    assert config.dtype is None


def test_mistral_has_defaults_of_its_own(tmp_path: Path) -> None:
    settings = {"architectures": ["MistralForCausalLM"], "num_attention_heads": 16}
    config = read(tmp_path, **settings)
    assert (config.num_kv_heads, config.layers[2].window) == (8, 4096)
    assert read(tmp_path, **settings, sliding_window=None).layers[2].window is None


def test_end_tokens_of_both_files_are_joined(tmp_path: Path) -> None:
    config = read(tmp_path, {"eos_token_id": [3, 5]}, eos_token_id=[2, 3])
    assert config.eos_token_ids == {2, 3, 5}
    assert read(tmp_path, {}, eos_token_id=None).eos_token_ids == frozenset()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_has_an_old_and_a_new_name(tmp_path: Path, key: str) -> None:
    assert read(tmp_path, **{key: "bfloat16"}).dtype == "bfloat16"


def frequencies_of(config: ModelConfig) -> torch.Tensor:
    return config.ropes[0].inverse_frequencies(64, 2048)


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_rope_settings_under_any_name_give_the_same_frequencies(tmp_path: Path, kind: str) -> None:
    extra = LLAMA3 if kind == "llama3" else {"factor": 8.0}
    variants = [
        {"rope_theta": 5e5, "rope_scaling": {"type": kind, **extra}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, **extra}},
        {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **extra}},
    ]
    frequencies = [frequencies_of(read(tmp_path, **v)) for v in variants]
    assert torch.equal(frequencies[0], frequencies[1])
    assert torch.equal(frequencies[0], frequencies[2])
    plain = frequencies_of(read(tmp_path, rope_theta=5e5))
    assert not torch.allclose(frequencies[0], plain)


PAIRS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
STRETCHED = {
    "plain": ({}, 128),
    "linear": ({"type": "linear", "factor": 4.0}, 512),
    "dynamic": ({"type": "dynamic", "factor": 2.0}, 256),
    "yarn": ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    "yarn, counted already": (
        {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 128,
    ),
    "llama3": ({"type": "llama3", **LLAMA3}, 128),
    "longrope": ({"type": "longrope", "original_max_position_embeddings": 32, **PAIRS}, 128),
}  # fmt: skip


@pytest.mark.parametrize(("scaling", "longest"), STRETCHED.values(), ids=STRETCHED)
def test_some_ropes_stretch_beyond_the_positions_that_the_config_names(
    tmp_path: Path, scaling: dict[str, Any], longest: int
) -> None:
    config = read(tmp_path, max_position_embeddings=128, rope_scaling=scaling)
    assert (config.max_position_embeddings, config.longest_positions) == (128, longest)


def test_gemma_3_of_before_transformers_5_has_the_same_rotary_embeddings(tmp_path: Path) -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read(tmp_path, **gemma, rope_theta=5e5, rope_local_base_freq=2e4, rope_scaling=scaling)
    new = read(
        tmp_path,
        **gemma,
        rope_parameters={
            "full_attention": {"rope_theta": 5e5, **scaling},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    )
    full, windowed = old.ropes
    assert (full.theta, full.kind, full.factor) == (5e5, "linear", 8.0)
    assert (windowed.theta, windowed.kind) == (2e4, "default")
    for one, other in zip(old.ropes, new.ropes, strict=True):
        frequencies = [rope.inverse_frequencies(16, 128) for rope in (one, other)]
        assert torch.equal(*frequencies)
    # Already counted in max_position_embeddings.
    assert old.longest_positions == old.max_position_embeddings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM is not supported; supported: "),
        ({"architectures": None, "model_type": "x"}, r"names none \(model_type is 'x'\)"),
        ({"rope_scaling": {"type": "dizzy", "factor": 2.0}}, "rope_type: 'dizzy' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor: is missing"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "'bitnet' is not supported"),
        ({"num_key_value_heads": 3}, "3 does not divide num_attention_heads"),
        ({"hidden_size": 66}, "66 is no multiple of num_attention_heads"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"vocab_size": None}, "vocab_size: is missing"),
        ({"vocab_size": "many"}, "vocab_size: must be a positive whole number, not 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be a positive whole number, not 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps: must be a positive finite number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id: must be a token id or a list"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: 1.5 is more than the whole head"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor: 3 of 16 dimensions turn"),
        ({"rope_parameters": [1]}, r"rope_parameters: must be an object, not \[1\]"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": 2.0}},
            "rope_scaling: long_factor: must be a list of positive finite numbers, not 2.0",
        ),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
            "short_factor: has 7 numbers for 8 pairs",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "head_dim": 16,
                "num_key_value_heads": 4,
                "layer_types": ["full_attention"],
            },
            "layer_types: names 1 layers, not 3",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["mamba"] * 3},
            "layer_types: 'mamba' is not supported",
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention: True is not supported; supported: False",
        ),
        (
            {"architectures": ["OPTForCausalLM"], "ffn_dim": 96, "do_layer_norm_before": False},
            "do_layer_norm_before: False is not supported; supported: True",
        ),
        (
            {"architectures": ["OPTForCausalLM"], "ffn_dim": 96, "word_embed_proj_dim": 32},
            r"word_embed_proj_dim: 32 is not hidden_size \(64\)",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"], "n_head": 5},
            r"n_embd: 768 is no multiple of num_attention_heads \(5\)",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"], "activation_function": "silu"},
            "activation_function: 'silu' is not supported",
        ),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": 3},
            "text_config: must be an object, not 3",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, **settings)


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path} has no config.json")):
        ModelConfig.read(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.read(tmp_path)


@pytest.mark.parametrize(
    "vocabulary", [{"a": 0, "b": 4}, [["a", -1.0], ["b", -2.0], ["c", -3.0], ["d", 0.0], ["e", 0]]]
)
def test_the_vocabulary_ends_with_the_highest_id(tmp_path: Path, vocabulary: object) -> None:
    assert tokenizer_vocab_size(tmp_path) is None
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    assert tokenizer_vocab_size(tmp_path) == 5
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"id": 6}]}))
    assert tokenizer_vocab_size(tmp_path) == 7
    path.write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer file"):
        tokenizer_vocab_size(tmp_path)


def test_heads_that_the_gpu_kernels_do_not_take_are_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loading, "attention_ops", lambda _: SimpleNamespace(name="triton"))
    with pytest.raises(
        ModelError, match=r"LlamaForCausalLM has heads of 16; on .* takes 64, 80, 96"
    ):
        model_loading.load_model(
            tmp_path,
            read(tmp_path),
            EngineConfig(model=str(tmp_path)),
            max_model_len=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
            load=load_weights,
        )
