"""The plan: blocks by the cache's own shape, refusals with the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from inferq.protocol.errors import InvalidRequestError, ModelError
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.running.kv_cache import KVCacheShape
from inferq.worker.plan import GIB, MIB, Demand, make_plan, memory_of

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
WEIGHTS = 16_381_470_720  # 8.19 billion parameters of two bytes


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


def test_an_80_gb_gpu_holds_twenty_thousand_blocks_of_an_8b_model(folder: str) -> None:
    plan = make_plan(folder, Demand(memory_of("h100")), WEIGHTS)
    shape = KVCacheShape.of(ModelConfig.read(Path(folder)), 16, torch.bfloat16)
    assert plan.block_bytes == shape.block_bytes == 2.25 * MIB
    total = plan.weight_bytes + plan.step_bytes + plan.cache_bytes
    assert total == int(memory_of("H100") * 0.9)
    assert plan.num_blocks == plan.cache_bytes // plan.block_bytes
    assert 20_000 < plan.num_blocks < 27_000
    assert plan.jobs_of(17) == plan.num_blocks // 2
    assert plan.max_model_len == 40_960


def test_ranks_share_weights_and_kv_heads_until_there_is_one_head_each(folder: str) -> None:
    one = make_plan(folder, Demand(memory_of("h200")), WEIGHTS)
    for ranks, heads in ((2, 4), (8, 1), (16, 1)):
        plan = make_plan(folder, Demand(memory_of("h200"), ranks), WEIGHTS)
        assert plan.weight_bytes == -(-WEIGHTS // ranks)
        assert plan.block_bytes == one.block_bytes * heads // 8
        assert plan.num_blocks > one.num_blocks


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(folder: str) -> None:
    with pytest.raises(ModelError, match=r"of 15\.0 GiB, weights take 15\.3 .* 0 blocks"):
        make_plan(folder, Demand(memory_of("t4")), WEIGHTS)
    with pytest.raises(ModelError, match="one job of 40960 tokens"):
        make_plan(folder, Demand(memory_of("22")), WEIGHTS)
    plan = make_plan(folder, Demand(memory_of("22"), max_model_len=4096), WEIGHTS)
    assert plan.max_model_len == 4096


def test_weights_are_measured_or_must_be_told(folder: str) -> None:
    with pytest.raises(ModelError, match="no weights; say how large they are"):
        make_plan(folder, Demand(memory_of("h100")))
    for shard in ("model-1.safetensors", "model-2.safetensors"):
        with (Path(folder) / shard).open("wb") as file:
            file.truncate(3 * GIB)
    plan = make_plan(folder, Demand(memory_of("h100")))
    assert plan.weight_bytes == 6 * GIB


@pytest.mark.parametrize("gpu", ["h1", "-3", "0", "nan", "inf", ""])
def test_a_gpu_that_nobody_knows_is_refused_with_those_known(gpu: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"number of GiB nor one of .*h100"):
        memory_of(gpu)


def test_memory_may_be_a_number_of_gibibytes() -> None:
    assert memory_of("79.5") == int(79.5 * GIB)
    assert memory_of("A100-80GB") == 80 * GIB
