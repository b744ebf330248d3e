"""Every family of models against transformers, in float32, in any chunks and company."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.architecture.families import FAMILIES

Make = Callable[..., Any]

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GEMMA = {"head_dim": 32, "pad_token_id": 0, "query_pre_attn_scalar": 24}
OPT = {"num_key_value_heads": 4, "ffn_dim": 96}
GPT2 = {"num_key_value_heads": 4, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
PHI = {"pad_token_id": 0, "rms_norm_eps": 1e-5}

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "Llama": ("Llama", {}),
    "Mistral, window": ("Mistral", {"sliding_window": 8}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, windows in upper layers": ("Qwen2", QWEN_WINDOW),
    "Qwen3": ("Qwen3", {"head_dim": 24}),
    "Qwen3, biases and windows": ("Qwen3", {"head_dim": 16, "attention_bias": True, **QWEN_WINDOW}),
    "Phi-3": ("Phi3", PHI),
    "Phi-3, head_dim 96, window": (
        "Phi3",
        {**PHI, "hidden_size": 192, "num_attention_heads": 2, "sliding_window": 8},
    ),
    "Phi-3, partial rotation": (
        "Phi3",
        {
            **PHI,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "Gemma": ("Gemma", {"head_dim": 32, "pad_token_id": 0}),
    "Gemma 2": ("Gemma2", {**GEMMA, "sliding_window": 8, "attn_logit_softcapping": 5.0}),
    "Gemma 2 without caps": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "Gemma 3": (
        "Gemma3Text",
        {**GEMMA, "num_hidden_layers": 7, "sliding_window": 8, "final_logit_softcapping": 20.0},
    ),
    "Gemma 3, other pattern": (
        "Gemma3Text",
        {
            **GEMMA,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "Gemma 3, full layers stretched": (
        "Gemma3Text",
        {
            **GEMMA,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "Gemma 3 of a model that sees images": (
        "Gemma3",
        {
            "text_config": {**TINY, **GEMMA, "sliding_window": 8, "sliding_window_pattern": 3},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
        },
    ),
    "GPT-2": ("GPT2", GPT2),
    "GPT-2, another MLP": ("GPT2", {**GPT2, "n_inner": 80, "activation_function": "gelu"}),
    "OPT": ("OPT", OPT),
    "OPT, untied, no biases": (
        "OPT",
        {**OPT, "tie_word_embeddings": False, "enable_bias": False},
    ),
}


def make(make_model: Make, name: str, **settings: object) -> Path:
    family, own = MODELS[name]
    return Path(make_model(family, **{**own, **settings}))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(
    make_model: Make, driver_of: Make, reference_logits: Make, random_text: Make, name: str
) -> None:
    folder = make(make_model, name)
    texts = [random_text(length, length) for length in (5, 17, 40)]
    ours = driver_of(folder).logits_in_chunks(texts, [[5], [1, 1, 9], [16, 17]])
    for text, logits in zip(texts, ours, strict=True):
        expected = reference_logits(folder, text)
        assert expected.std() > 0.1
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_every_architecture_of_the_table_is_compared(make_model: Make) -> None:
    assert {ModelConfig.read(make(make_model, name)).architecture for name in MODELS} == set(
        FAMILIES
    )


FACTORS = {
    "short_factor": [1.0 + i / 9 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
SHORT = {"original_max_position_embeddings": 32}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("Llama", {"rope_type": "linear", "factor": 4.0}),
    "dynamic": ("Llama", {"rope_type": "dynamic", "factor": 2.0}),
    "llama3": (
        "Llama",
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "rope_theta": 500.0, **SHORT},
    ),
    "yarn": ("Llama", {"rope_type": "yarn", "factor": 4.0, **SHORT}),
    "yarn with all settings": (
        "Qwen2",
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.9,
         "mscale_all_dim": 0.7, "truncate": False, "rope_theta": 500.0, **SHORT},
    ),
    "yarn with an attention factor": (
        "Llama", {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, **SHORT},
    ),
    "longrope": ("Phi3", {"rope_type": "longrope", **FACTORS}),
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_ropes_equal_those_of_transformers_beyond_their_original_length(
    make_model: Make, driver_of: Make, reference_logits: Make, random_text: Make, rope: str
) -> None:
    family, settings = ROPES[rope]
    # Where the frequencies depend on the length, it is the longest: 32 is where they change.
    extra: dict[str, Any] = {"max_position_embeddings": 32} if rope == "dynamic" else {}
    if family == "Phi3":
        extra = {**PHI, "original_max_position_embeddings": 32}
    folder = make_model(family, rope_parameters={"rope_theta": 1e4, **settings}, **extra)
    for length in (32, 96):
        text = random_text(length, length)
        driver = driver_of(folder, max_positions=length)
        (ours,) = driver.logits_in_chunks([text], [[17, length - 20]])
        torch.testing.assert_close(ours, reference_logits(folder, text), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi-3", "Gemma 2", "Gemma 3", "GPT-2", "OPT"])
def test_16_bits_stay_near_32(
    make_model: Make,
    driver_of: Make,
    reference_logits: Make,
    random_text: Make,
    name: str,
    dtype: torch.dtype,
) -> None:
    folder, text = make(make_model, name), random_text(24, 1)
    exact = reference_logits(folder, text)
    theirs = reference_logits(folder, text, dtype).float()
    driver = driver_of(folder, dtype=dtype)
    (ours,) = driver.logits_in_chunks([text], [[10, 11]])
    assert ours.dtype == dtype
    # No farther from the truth than transformers is, within the noise of rounding.
    assert (ours.float() - exact).norm() < 1.5 * (theirs - exact).norm()
