"""SmolLM2 as AWQ, packed after the published format: small, and right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inferq import LLM, SamplingParams
from inferq.kernels.attention import AttentionBatch
from inferq.kernels.matmul_int4 import UnpackedInt4Weight
from inferq.protocol.errors import ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model import quantized_weight
from inferq.worker.model.kv_cache import KVCacheShape
from inferq.worker.model.loader import load_weights
from inferq.worker.model.model_loading import load_model, read_model_config
from inferq.worker.model.transformer import Decoder

pytestmark = pytest.mark.model

CPU = torch.device("cpu")
GROUP = 64
NAME = "model.safetensors"


@pytest.fixture(scope="module")
def awq(smollm2: Path, pack_awq: Callable[..., Any], tmp_path_factory: Any) -> Path:
    """SmolLM2 with its projections as AWQ and the rest in float16."""
    folder = Path(tmp_path_factory.mktemp("awq"))
    for path in smollm2.glob("*.json"):
        shutil.copy(path, folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(smollm2 / NAME).items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            packed = asdict(pack_awq(tensor, GROUP))
            tensors |= {f"{module}.{kind}": part for kind, part in packed.items()}
        else:
            tensors[name] = tensor.half()
    save_file(tensors, folder / NAME)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float16"
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path, dtype: torch.dtype) -> Decoder:
    decoder = load_model(
        folder,
        read_model_config(folder),
        EngineConfig(model=str(folder)),
        max_model_len=512,
        dtype=dtype,
        device=CPU,
        load=load_weights,
    )
    assert isinstance(decoder, Decoder)
    return decoder


@torch.inference_mode()
def logits(decoder: Decoder, dtype: torch.dtype, token_ids: list[int]) -> Tensor:
    """Return the logits [T, vocab_size] of a text that is computed at once."""
    count, block_size = len(token_ids), 16
    blocks = -(-count // block_size)
    cache = KVCacheShape.of(decoder.config, block_size, dtype).allocate(blocks, CPU)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(count),
        num_decodes=0,
        query_lens=(count,),
        context_lens=(0,),
        block_size=block_size,
    )
    positions = torch.arange(count)
    return decoder.forward(torch.tensor(token_ids), positions, batch, cache, positions).float()


def layer_bytes(decoder: Decoder) -> int:
    return sum(linear.nbytes for layer in decoder.layers for linear in layer.linears)


def distances(result: Tensor, expected: Tensor) -> Tensor:
    """Return each row's difference, relative to the spread of its logits: an offset is none."""
    result, expected = (x - x.mean(dim=1, keepdim=True) for x in (result, expected))
    return (result - expected).norm(dim=1) / expected.norm(dim=1)


@pytest.fixture(scope="module")
def texts(greedy_cases: list[Any]) -> list[list[int]]:
    return [
        case.prompt_token_ids + case.token_ids[:-1]
        for case in greedy_cases
        if case.name in ("capital", "repeat")
    ]


@pytest.fixture(scope="module")
def exact(awq: Path, texts: list[list[int]]) -> list[Tensor]:
    """Logits of the same weights, multiplied in float32."""

    def whole(*weight: Any) -> UnpackedInt4Weight:
        return UnpackedInt4Weight(*weight[:4])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_weight, "pack_int4", whole)
        decoder = load(awq, torch.float32)
    return [logits(decoder, torch.float32, text) for text in texts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_rounded_weights_in_a_quarter_of_the_memory(
    awq: Path, texts: list[list[int]], exact: list[Tensor], dtype: torch.dtype
) -> None:
    decoder = load(awq, dtype)
    weights = sum(
        layer.attention.qkv.outputs * 576
        + layer.attention.output.outputs * 576
        + layer.mlp.input.outputs * 576
        + layer.mlp.output.outputs * 1536
        for layer in decoder.layers
    )
    # Of two bytes for each weight; for a group of 64 a float32 scale and a byte of zero.
    assert layer_bytes(decoder) < 0.3 * 2 * weights
    for text, expected in zip(texts, exact, strict=True):
        result = logits(decoder, dtype, text)
        # What remains is the rounding of activations to int8, through 30 layers.
        assert distances(result, expected).median() < 0.08
        assert (result.argmax(1) == expected.argmax(1)).float().mean() > 0.85


def test_answers_begin_like_those_of_the_whole_weights(awq: Path, greedy_cases: list[Any]) -> None:
    """Weights rounded to the nearest of 16, without calibration, turn some close choices."""
    llm = LLM(str(awq), quantization="awq", max_model_len=1024, num_kv_blocks=256)
    outputs = llm.generate(
        [{"prompt_token_ids": case.prompt_token_ids} for case in greedy_cases],
        SamplingParams(temperature=0.0, max_tokens=1),
        use_tqdm=False,
    )
    same = {
        case.name
        for case, output in zip(greedy_cases, outputs, strict=True)
        if output.outputs[0].token_ids[0] == case.token_ids[0]
    }
    assert same >= {"capital", "haiku", "sum", "czech", "chinese", "emoji"}, "the questions"
    assert len(same) >= 0.65 * len(greedy_cases)


def test_what_the_checkpoint_is_not_is_refused(awq: Path, smollm2: Path) -> None:
    with pytest.raises(ModelError, match=r"int8 was asked for, but the .* weights are awq already"):
        LLM(str(awq), quantization="int8")
    with pytest.raises(ModelError, match="awq was asked for, but the checkpoint's weights are not"):
        LLM(str(smollm2), quantization="awq")
