"""What the KV cache holds its values in: the model's type, another one, or half beside int8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inferq.protocol.errors import InvalidRequestError, ModelError
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.factory import load_engine
from inferq.worker.model.running.kv_cache import settle_kv_cache_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("options", "model", "device", "expected"),
    [
        ({}, torch.float32, CPU, torch.float32),
        ({}, torch.float16, CUDA, torch.float16),
        ({"quantization": "int8"}, torch.float32, CPU, torch.bfloat16),
        ({"quantization": "int8", "kv_cache_dtype": "float32"}, torch.float32, CPU, torch.float32),
        ({"kv_cache_dtype": "bfloat16"}, torch.float32, CPU, torch.bfloat16),
        ({"kv_cache_dtype": "bfloat16"}, torch.bfloat16, CUDA, torch.bfloat16),
    ],
)
def test_the_cache_has_the_models_type_unless_told_otherwise(
    options: dict[str, str], model: torch.dtype, device: torch.device, expected: torch.dtype
) -> None:
    config = EngineConfig(model="m", **options)
    is_quantized = config.quantization is not None
    settled = settle_kv_cache_dtype(config, model, device, is_quantized=is_quantized)
    assert getattr(torch, settled.kv_cache_dtype) == expected


def test_another_type_on_cuda_is_refused() -> None:
    config = EngineConfig(model="m", kv_cache_dtype="float16")
    with pytest.raises(ModelError, match="kv_cache_dtype: float16 is not supported on CUDA"):
        settle_kv_cache_dtype(config, torch.bfloat16, CUDA, is_quantized=False)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="kv_cache_dtype"):
        EngineConfig(model="m", kv_cache_dtype="int3")


def test_a_half_cache_gives_close_log_probabilities(make_model: Callable[[], Path]) -> None:
    folder = make_model()
    prompt = tuple(range(5, 45))
    params = SamplingParams(
        temperature=0.0, max_tokens=4, prompt_logprobs=0, ignore_eos=True, seed=0
    )
    found = []
    for dtype in ("float32", "bfloat16"):
        config = EngineConfig(
            model=str(folder),
            kv_cache_dtype=dtype,
            num_kv_blocks=8,
            max_num_seqs=4,
            max_num_batched_tokens=16,
        )
        engine = load_engine(config)
        engine.add_request(
            EngineRequest(request_id="r", prompt_token_ids=prompt, params=params, arrival=0.0)
        )
        logprobs: list[float] = []
        while engine.has_work():
            for output in engine.step():
                logprobs += [each.logprob for each in (output.prompt_logprobs or ()) if each]
        found.append(torch.tensor(logprobs))
    exact, half = found
    assert len(exact) == len(prompt) - 1
    assert 0 < (exact - half).abs().max() < 0.1
