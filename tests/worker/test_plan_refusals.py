"""What a worker refuses of a model or its settings, the plan refuses in the same words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from inferq.protocol.errors import InferqError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.loading.quantization import check_quantized_checkpoint
from inferq.worker.model.running.runner import load_runner
from inferq.worker.plan import GIB, Demand, make_plan

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


def folder_of(path: Path, **settings: object) -> Path:
    (path / "config.json").write_text(json.dumps({**MODEL, **settings}))
    return path


def planned(folder: Path, **settings: object) -> InferqError:
    with pytest.raises(InferqError) as caught:
        make_plan(str(folder), Demand(80 * GIB, **settings), GIB)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ({}, {"max_model_len": 8193}),
        ({}, {"max_model_len": 1}),
        ({"rope_scaling": YARN}, {"max_model_len": 32_769}),
        ({}, {"tensor_parallel_size": 2}),
        ({}, {"tensor_parallel_size": 9}),
        ({}, {"tensor_parallel_size": 0}),
        ({}, {"block_size": 24}),
        ({}, {"max_num_seqs": 0}),
        ({}, {"max_num_seqs": 4096}),
        ({}, {"max_num_batched_tokens": 128}),
        ({}, {"gpu_memory_utilization": 1.5}),
        ({"quantization_config": {"quant_method": "fp8"}}, {}),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
            {"tensor_parallel_size": 3},
        ),
    ],
)
def test_the_worker_says_the_same(tmp_path: Path, model, settings) -> None:
    folder = folder_of(tmp_path, **model)
    with pytest.raises(InferqError) as served:
        load_runner(EngineConfig(model=str(folder), device="cpu", **settings))
    refusal = planned(folder, **settings)
    assert (type(refusal), str(refusal)) == (type(served.value), str(served.value))
    assert getattr(refusal, "field", None) == getattr(served.value, "field", None)


@pytest.mark.parametrize("asked", [8193, 32_768])
def test_a_length_to_which_a_scaled_model_stretches_is_planned(tmp_path: Path, asked: int) -> None:
    folder = folder_of(tmp_path, rope_scaling=YARN)
    assert make_plan(str(folder), Demand(80 * GIB, max_model_len=asked), GIB).max_model_len == asked
    assert make_plan(str(folder), Demand(80 * GIB), GIB).max_model_len == 8192


def test_what_only_a_gpu_refuses_is_refused_without_one(tmp_path: Path) -> None:
    heads = folder_of(tmp_path, head_dim=48)
    assert "heads of 48; on cuda attention takes 64, 80" in str(planned(heads))
    assert "'float64' is not supported" in str(planned(folder_of(tmp_path, torch_dtype="float64")))
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32}
    quantized = folder_of(tmp_path, torch_dtype="float32", quantization_config=awq)
    stored = ModelConfig.read(quantized).quantization
    with pytest.raises(InferqError) as served:
        check_quantized_checkpoint(stored, None, torch.device("cuda"), torch.float32)
    assert str(planned(quantized)) == str(served.value)


def test_files_that_no_worker_reads_are_not_weighed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for name in ("model.safetensors", "consolidated.safetensors", "adapter_model.safetensors"):
        with (folder / name).open("wb") as file:
            file.truncate(GIB)
    assert make_plan(str(folder), Demand(80 * GIB)).weight_bytes == GIB
