"""Forms of a model's weights, and what quantizing them changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inferq.kernels import matmul
from inferq.protocol.errors import InvalidRequestError, ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.architecture.linear import Linear, LinearMethod, check_quantization

Make = Callable[..., Any]
CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def _form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(matmul, "native_function", lambda *_: None)
        monkeypatch.setattr("inferq.kernels.matmul_int8.native_function", lambda *_: None)


def _linear(dtype: torch.dtype) -> Linear:
    torch.manual_seed(3)
    linear = Linear(96, 40, bias=True, dtype=dtype, device=CPU)
    linear.weight.normal_()
    assert linear.bias is not None
    linear.bias.normal_()
    return linear


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize(
    ("quantization", "dtype", "tolerance"),
    [
        (None, torch.float32, 1e-5),
        (None, torch.bfloat16, 5e-3),
        ("int8", torch.float32, 0.02),
        ("int8", torch.bfloat16, 0.02),
    ],
)
def test_packing_changes_the_form_and_not_the_product(
    quantization: str | None, dtype: torch.dtype, tolerance: float
) -> None:
    linear = _linear(dtype)
    x = torch.randn(7, 96, dtype=dtype)
    expected, plain_size = linear(x), linear.nbytes
    method = LinearMethod(quantization)
    linear.pack(method)
    linear.pack(method)
    assert not hasattr(linear, "weight")
    result = linear(x)
    assert result.dtype == dtype
    assert (result - expected).norm() < tolerance * expected.norm()
    if quantization:
        assert linear.nbytes < plain_size


def test_int8_runs_on_the_cpu_only() -> None:
    check_quantization(None, torch.device("cuda", 0))
    check_quantization("int8", CPU)
    with pytest.raises(ModelError, match=r"quantization.*int8 runs on the CPU only.*cuda:0"):
        check_quantization("int8", torch.device("cuda", 0))


@pytest.mark.parametrize("name", ["int3", "", 8])
def test_an_unknown_quantization_is_refused(name: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"quantization.*int8"):
        EngineConfig(model="m", quantization=name)


@pytest.mark.usefixtures("_form")
@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_model_computes_much_like_the_plain_one(
    make_model: Make, driver_of: Make, tied: bool
) -> None:
    folder: Path = make_model(tie_word_embeddings=tied)
    text = list(range(1, 30))
    plain, rounded = (
        driver_of(folder, quantization=quantization).logits_in_chunks([text], [[20]])[0]
        for quantization in (None, "int8")
    )
    error = (rounded - plain).norm() / plain.norm()
    assert 0 < error < 0.1
