"""Architectures that transformers computes, over our paged cache."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inferq.protocol.errors import ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.running.runner import load_runner

Make = Callable[..., Any]

GPT_NEOX = {"num_key_value_heads": 4, "hidden_act": "gelu"}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWED = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "StableLM": ("StableLm", {}),
    "OLMo 2": ("Olmo2", {"pad_token_id": 0}),
    "Granite, with scaled logits": ("Granite", {"logits_scaling": 3.0}),
    "Cohere": ("Cohere", {"logit_scale": 0.3, "pad_token_id": 0}),
    "Mixtral": ("Mixtral", {**MOE, "sliding_window": 8}),
    "GPT-NeoX": ("GPTNeoX", GPT_NEOX),
    "Exaone 4, windows": ("Exaone4", WINDOWED),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(
    make_model: Make, driver_of: Make, reference_logits: Make, random_text: Make, name: str
) -> None:
    family, settings = MODELS[name]
    folder = make_model(family, **settings)
    texts = [random_text(length, length) for length in (5, 17, 40)]
    ours = driver_of(folder).logits_in_chunks(texts, [[5], [1, 1, 9], [16, 17]])
    for text, logits in zip(texts, ours, strict=True):
        expected = reference_logits(folder, text)
        assert expected.std() > 0.1
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_the_engine_serves_it_and_the_log_says_which_path_it_takes(
    make_model: Make,
    loop_of: Make,
    reference_logits: Make,
    random_text: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = make_model("StableLm")
    caplog.set_level(logging.INFO)
    loop = loop_of(folder)
    assert any("StableLmForCausalLM (transformers)" in line for line in caplog.messages)
    sequence = loop.add(random_text(9, 1), temperature=0.0, max_tokens=4)
    loop.run([sequence])
    for count in range(4):
        logits = reference_logits(folder, sequence.token_ids[: 9 + count])
        assert sequence.token_ids[9 + count] == int(logits[-1].argmax())


REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "Mamba": ("Mamba", {}, "0 of its 3 layers attend through"),
    "convolutions between layers": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "full_attention"]},
        "cannot be served: 2 of its 3 layers attend through transformers' interface",
    ),
    "sinks": ("GptOss", {"head_dim": 16}, "its attention depends on 's_aux'"),
    "ALiBi": ("Bloom", {"n_layer": 3, "n_head": 4}, "0 of its 3 layers attend through"),
    "attention of its own": (
        "Falcon",
        {"num_kv_heads": 4, "num_key_value_heads": 4},
        "transformers cannot load it|a forward pass fails",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_paged_attention_does_not_suit_is_refused(
    make_model: Make, driver_of: Make, name: str
) -> None:
    family, settings, message = REFUSED[name]
    folder = make_model(family, **settings)
    with pytest.raises(ModelError, match=message):
        driver_of(folder)


def test_a_model_whose_tokens_meet_outside_of_attention_is_refused(
    make_model: Make, driver_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.stablelm.modeling_stablelm import StableLmMLP

    forward = StableLmMLP.forward
    monkeypatch.setattr(
        StableLmMLP, "forward", lambda self, x: forward(self, x + x.roll(1, dims=1))
    )
    with pytest.raises(ModelError, match="tokens meet outside of attention"):
        driver_of(make_model("StableLm"))


def test_weights_that_do_not_fit_are_named(
    make_model: Make, driver_of: Make, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(make_model("StableLm"), tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"missing tensors: .*{name}"):
        driver_of(folder)


def test_rotation_that_depends_on_the_batch_ends_at_the_original_length(
    make_model: Make, tmp_path: Path
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    folder = Path(shutil.copytree(make_model("StableLm"), tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    with pytest.raises(ModelError, match="200 is more than the model's 128 positions"):
        load_runner(EngineConfig(model=str(folder), max_model_len=200))


def test_quantization_is_for_our_own_decoder(make_model: Make) -> None:
    with pytest.raises(ModelError, match="quantization: StableLmForCausalLM is computed by"):
        load_runner(EngineConfig(model=str(make_model("StableLm")), quantization="int8"))
