"""quantization_config: what is read from it, and what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferq.protocol.errors import ModelError
from inferq.worker.model.architecture.fields import Fields
from inferq.worker.model.architecture.quantized_weight import QuantizedWeight
from inferq.worker.model.loading.quantization import QuantizedFormat, check_quantized_checkpoint

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def read(settings: dict[str, Any]) -> QuantizedFormat:
    return QuantizedFormat.read(Fields(settings, "config.json: quantization_config"))


def test_awq_settings_have_old_and_new_names() -> None:
    expected = QuantizedFormat("awq", 64)
    assert read(AWQ) == expected
    assert read({**AWQ, "version": "GEMM", "modules_to_not_convert": None}) == expected
    assert read({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}) == expected
    assert read({**AWQ, "modules_to_not_convert": ["mlp"]}).unconverted == ("mlp",)


def test_gptq_zeros_are_stored_less_one_in_the_first_version() -> None:
    assert read(GPTQ) == QuantizedFormat("gptq", 128, zero_offset=1)
    assert read({**GPTQ, "checkpoint_format": "gptq"}).zero_offset == 1
    assert read({**GPTQ, "checkpoint_format": "gptq_v2"}).zero_offset == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**AWQ, "quant_method": "fp8"}, "quant_method: 'fp8' is not supported.* awq, gptq"),
        ({**AWQ, "bits": 8}, "bits: 8 is not supported; supported: 4"),
        ({"quant_method": "awq", "w_bit": 3}, "w_bit: 3 is not supported"),
        ({**AWQ, "version": "GEMV"}, "version: 'gemv' is not supported; supported: 'gemm'"),
        ({**AWQ, "version": "marlin"}, "version: 'marlin' is not supported"),
        ({**AWQ, "backend": "llm-awq"}, "backend: 'llm-awq' is not supported"),
        ({**AWQ, "zero_point": False}, "zero_point: weights without zero points"),
        ({**AWQ, "group_size": 16}, "group_size: 16 is not supported.* 32, 64, 128, -1"),
        ({**AWQ, "group_size": True}, "group_size: True is not supported"),
        ({**AWQ, "modules_to_not_convert": "mlp"}, "modules_to_not_convert: must be a list"),
        ({**GPTQ, "bits": 3}, "bits: 3 is not supported"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' is not supported"),
        ({**GPTQ, "is_marlin_format": True}, "checkpoint_format: 'marlin' is not supported"),
        ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "dynamic: .* is not supported"),
        ({**GPTQ, "lm_head": True}, "lm_head: True is not supported"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"quantization_config: {message}"):
        read(settings)


def test_modules_are_excluded_by_parts_of_their_names() -> None:
    stored = QuantizedFormat("awq", 64, ("layers.1", "down_proj", "vision."))
    assert not stored.converts("model.layers.1.self_attn.q_proj")
    assert stored.converts("model.layers.10.self_attn.q_proj")
    assert not stored.converts("model.layers.10.mlp.down_proj")
    assert stored.converts("model.visions.q_proj")


def test_a_product_that_is_quantized_in_part_is_refused() -> None:
    modules = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    message = r"layers\.0\.mlp\.up_proj is in modules_to_not_convert and .*gate_proj is not"
    with pytest.raises(ModelError, match=message):
        QuantizedFormat("awq", 64, ("up_proj",)).projection(modules)


@pytest.mark.parametrize(
    ("inputs", "sizes", "group", "message"),
    [
        (96, [32, 32], 64, "q: 96 inputs cannot be divided into groups of 64"),
        (60, [32, 32], -1, "q: 60 inputs are no multiple of 8"),
        (64, [32, 28], 32, "k: 28 outputs are no multiple of 8"),
    ],
)
def test_sizes_that_do_not_fit_the_format_are_refused(
    inputs: int, sizes: list[int], group: int, message: str
) -> None:
    projection = QuantizedFormat("awq", group).projection(["q", "k"])
    assert projection is not None
    with pytest.raises(ModelError, match=message):
        list(QuantizedWeight(projection, inputs, sum(sizes), CPU).targets(sizes))


def test_a_checkpoint_and_what_is_asked_for_must_agree() -> None:
    awq, gptq = read(AWQ), read(GPTQ)
    for asked in (None, "awq"):
        check_quantized_checkpoint(awq, asked, CPU, torch.float32)
        check_quantized_checkpoint(awq, asked, CUDA, torch.bfloat16)
    for asked in (None, "int8"):
        check_quantized_checkpoint(None, asked, CPU, torch.float32)
    for stored, asked, message in (
        (None, "awq", "quantization: awq was asked for, but the checkpoint's weights are not"),
        (None, "gptq", "quantization: gptq was asked for, but the checkpoint's weights are not"),
        (awq, "gptq", "quantization: gptq was asked for, but the checkpoint's weights are awq"),
        (gptq, "awq", "quantization: awq was asked for, but the checkpoint's weights are gptq"),
        (awq, "int8", "quantization: int8 was asked for, but the checkpoint's weights are awq"),
    ):
        with pytest.raises(ModelError, match=message):
            check_quantized_checkpoint(stored, asked, CPU, torch.float32)
    with pytest.raises(
        ModelError, match=r"dtype: awq weights are multiplied in float16 or bfloat16"
    ):
        check_quantized_checkpoint(awq, None, CUDA, torch.float32)
