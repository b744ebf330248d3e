"""An adapter that does not fit, or that we do not compute, is refused; the message says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferq.protocol.errors import InvalidRequestError, ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.running.runner import load_runner

Make = Callable[..., Any]
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def load(make_model: Make, write_adapter: Make, tmp_path: Path) -> Callable[..., Any]:
    """Write an adapter of rank 4, let `spoil` change its folder, and load it."""

    def run(
        spoil: Callable[[Path], None] | None = None, max_lora_rank: int = 64, **settings: Any
    ) -> Any:
        model = make_model()
        targets = settings.pop("targets", ("q_proj", "v_proj"))
        folder = write_adapter(tmp_path / "it", model, targets, rank=4, seed=0, **settings)
        if spoil is not None:
            spoil(folder)
        config = EngineConfig(
            model=str(model),
            device="cpu",
            num_kv_blocks=8,
            max_model_len=64,
            lora_adapters={"it": str(folder)},
            max_lora_rank=max_lora_rank,
        )
        return load_runner(config)

    return run


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, r"adapter_config.json: peft_type: 'IA3' .*'LORA'"),
        ({"r": 0}, r"adapter_config.json: r: must be a positive whole number, not 0"),
        ({"r": 65}, r"adapter_config.json: r: 65 is more than max_lora_rank \(64\)"),
        ({"lora_alpha": "8"}, r"lora_alpha: must be a number, not '8'"),
        ({"use_rslora": "yes"}, r"use_rslora: must be true or false, not 'yes'"),
        ({"use_dora": True}, r"use_dora: True is not supported"),
        ({"bias": "all"}, r"bias: 'all' is not supported; supported: 'none'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\] is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern: .*8.* is not supported"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights: 'pissa' changes the base model"),
        ({"task_type": "SEQ_CLS"}, r"task_type: 'SEQ_CLS' is not supported"),
        ({"target_modules": []}, r"target_modules: must name modules, not \[\]"),
        ({"target_modules": ["q_proj", "lm_head"]}, r"target_modules: 'lm_head' is not a projecti"),
        ({"target_modules": "("}, r"target_modules: '\(' is not a pattern"),
        ({"target_modules": "nothing"}, r"target_modules: 'nothing' matches no projection"),
        ({"target_modules": ["q_proj"]}, r"safetensors holds .*v_proj.*does not ask for"),
        ({"target_modules": "all-linear"}, r"safetensors lacks .*down_proj.*and \d+ more"),
        ({"layers_to_transform": [0, "x"]}, r"layers_to_transform: must be numbers of layers"),
        ({"layers_to_transform": 1}, r"holds .*layers\.0.*does not ask for"),
        ({"r": 8}, r"lora_A.weight has shape \[4, 64\]; the base model and r ask for \[8, 64\]"),
    ],
)
def test_a_setting_that_is_not_followed_is_named(
    load: Make, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["q_proj", "k_proj", "v_proj"], "exclude_modules": ["k_proj"]},
        {"targets": ("layers.1.self_attn.q_proj",), "target_modules": ["q_proj"],
         "layers_to_transform": [1]},
        {"max_lora_rank": 4, "fan_in_fan_out": True, "init_lora_weights": "gaussian"},
        {"unknown_to_us": None, "task_type": None},
    ],
)  # fmt: skip
def test_the_ways_to_name_modules_are_those_of_peft(load: Make, settings: dict[str, Any]) -> None:
    layers = load(**settings)._decoder.layers
    adapted = [i for i, layer in enumerate(layers) if layer.attention.qkv.lora is not None]
    assert adapted == settings.get("layers_to_transform", list(range(len(layers))))
    assert all(layer.attention.output.lora is None for layer in layers)


def _truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _change(name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
        save_file(tensors, path)

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text(json.dumps({})),
         "peft_type: None"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(),
         "has no adapter_model.safetensors"),
        (_pickle, r"pickles \(adapter_model.bin\), which can run code"),
        (_truncate, "adapter_model.safetensors is damaged or incomplete"),
        (_change(Q_A, None), rf"lacks {Q_A}"),
        (_change(Q_A, torch.zeros(4, 63)), r"has shape \[4, 63\]; .* ask for \[4, 64\]"),
        (_change(Q_A, torch.zeros(4, 64, dtype=torch.int8)), "has dtype I8; supported: F64"),
        (_change("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 64)),
         "holds base_model.model.lm_head.lora_A.weight"),
        (_change("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 97)),
         "holds .*lora_embedding_A.* only lora_A and lora_B are read"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_as_it_should_be_is_named(
    load: Make, spoil: Callable[[Path], None], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(spoil)


def test_an_adapter_without_a_folder_is_named(make_model: Make, tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(make_model()), device="cpu", lora_adapters={"it": tmp_path / "nowhere"}
    )
    with pytest.raises(ModelError, match=r"^lora_adapters: it: .*nowhere is not a folder"):
        load_runner(config)


def test_models_that_transformers_computes_take_no_adapters(
    make_model: Make, tmp_path: Path
) -> None:
    model = make_model("StableLm")
    config = EngineConfig(model=str(model), device="cpu", lora_adapters={"it": tmp_path})
    with pytest.raises(ModelError, match=r"^lora_adapters: StableLmForCausalLM is computed by tra"):
        load_runner(config)


@pytest.mark.parametrize(
    "adapters", [["a"], {"": "f"}, {"a": ""}, {"a": 3}, {"x" * 257: "f"}, {"\ud800": "f"}]
)
def test_adapters_are_folders_by_names(adapters: Any) -> None:
    with pytest.raises(InvalidRequestError, match="lora_adapters"):
        EngineConfig(model="m", lora_adapters=adapters)
