"""Tiny models whose checkpoints are AWQ or GPTQ, against transformers on what these round to."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inferq.kernels.awq import AwqWeight, awq_dequantize
from inferq.kernels.matmul_int4 import UnpackedInt4Weight
from inferq.kernels.native.library import load_native
from inferq.kernels.native.recording import Recording
from inferq.protocol.errors import ModelError
from inferq.worker.model.architecture import quantized_weight
from inferq.worker.model.architecture.quantized_weight import QuantizedWeight
from inferq.worker.model.loading.quantization import QuantizedFormat
from inferq.worker.model.running import recorded_decodes

Make = Callable[..., Any]
#: Groups of 128 divide both; heads of 32.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
NAME = "model.safetensors"
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": False}
#: Relative to the logits: the products round activations to int8, 0.8 % each.
CLOSE = 0.05
TEXT = [5, 80, 33, 7, 61, 12, 9, 44, 3, 90, 17]


class Packer:
    """Makes a quantized copy of a folder, and a plain one of what its weights round to."""

    def __init__(self, pack_awq: Make, gptq: ModuleType, tmp_path: Path) -> None:
        self._pack_awq, self._gptq, self._tmp_path = pack_awq, gptq, tmp_path
        self._count = 0

    def __call__(
        self,
        folder: Path,
        settings: dict[str, Any],
        *,
        keep: str = "(?!)",
        change: Callable[[dict[str, Tensor]], object] = lambda _: None,
    ) -> tuple[Path, Path]:
        """Quantize the projections of the layers whose names do not have the pattern `keep`."""
        self._count += 1
        copies = [self._tmp_path / f"{name}-{self._count}" for name in ("quantized", "plain")]
        for copy in copies:
            shutil.copytree(folder, copy)
        quantized: dict[str, Tensor] = {}
        plain: dict[str, Tensor] = {}
        for name, tensor in load_file(folder / NAME).items():
            module = name.removesuffix(".weight")
            is_converted = "layers." in name and tensor.dim() == 2 and not re.search(keep, name)
            if not is_converted:
                quantized[name] = plain[name] = tensor
                continue
            packed, plain[name] = self._pack(tensor, settings)
            quantized |= {f"{module}.{kind}": part for kind, part in packed.items()}
        change(quantized)
        save_file(quantized, copies[0] / NAME)
        save_file(plain, copies[1] / NAME)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = settings
        (copies[0] / "config.json").write_text(json.dumps(config))
        return copies[0], copies[1]

    def _pack(self, weight: Tensor, settings: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
        group = settings["group_size"]
        if settings["quant_method"] == "awq":
            packed = self._pack_awq(weight, group)
            plain = awq_dequantize(**asdict(packed), group=group, dtype=torch.float32).T
        else:
            offset = int(settings.get("checkpoint_format", "gptq") == "gptq")
            packed = self._gptq.pack_gptq(weight, group, sym=settings["sym"], zero_offset=offset)
            plain = self._gptq.dequantize_gptq(packed, offset)
        return asdict(packed), plain.contiguous()


@pytest.fixture
def quantize(pack_awq: Make, gptq_packing: ModuleType, tmp_path: Path) -> Packer:
    return Packer(pack_awq, gptq_packing, tmp_path)


def distance(result: Tensor, expected: Tensor) -> float:
    """Return the difference's norm, relative to that of the logits around their mean."""
    spread = expected - expected.mean(dim=1, keepdim=True)
    return float((result.float() - expected).norm() / spread.norm())


def logits(driver: Any) -> Tensor:
    """Return a text's logits, computed in two chunks and then token by token."""
    [result] = driver.logits_in_chunks([TEXT], [[4, 3]])
    return Tensor(result)


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize(
    "settings", [AWQ, GPTQ, {**GPTQ, "sym": False}], ids=["awq", "sym", "asym"]
)
def test_every_group_size_gives_the_logits_of_the_rounded_weights(
    make_model: Make,
    driver_of: Make,
    reference_logits: Make,
    quantize: Packer,
    settings: dict[str, Any],
    group: int,
) -> None:
    folder, plain = quantize(make_model(**SIZES), {**settings, "group_size": group})
    result = logits(driver_of(folder))
    assert distance(result, reference_logits(plain, TEXT)) < CLOSE


def test_without_native_kernels_the_weights_are_exact(
    make_model: Make,
    driver_of: Make,
    reference_logits: Make,
    quantize: Packer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The form for odd shapes rounds no activations: what differs is the order of sums."""
    monkeypatch.setattr(
        quantized_weight,
        "pack_int4",
        lambda weight, scales, zeros, group, _: UnpackedInt4Weight(weight, scales, zeros, group),
    )
    for settings in (AWQ, GPTQ, {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False}):
        folder, plain = quantize(make_model(**SIZES), {**settings, "group_size": 64})
        result = logits(driver_of(folder))
        torch.testing.assert_close(result, reference_logits(plain, TEXT), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_activations_are_close(
    make_model: Make,
    driver_of: Make,
    reference_logits: Make,
    quantize: Packer,
    dtype: torch.dtype,
) -> None:
    folder, plain = quantize(make_model(**SIZES), {**AWQ, "group_size": 64})
    result = logits(driver_of(folder, dtype=dtype))
    assert result.dtype == dtype
    assert distance(result, reference_logits(plain, TEXT)) < CLOSE


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Qwen2", {}),  # biases of query, key and value
        ("Phi3", {"pad_token_id": 0}),  # projections that the checkpoint has fused
        ("Gemma2", {"head_dim": 32}),
        (
            "OPT",
            {"ffn_dim": 256, "word_embed_proj_dim": 128, "num_key_value_heads": 4},
        ),  # biases throughout
    ],
)
def test_families_with_biases_and_fused_projections(
    make_model: Make,
    driver_of: Make,
    reference_logits: Make,
    quantize: Packer,
    family: str,
    settings: dict[str, Any],
) -> None:
    source = make_model(family, **SIZES, **settings)
    folder, plain = quantize(source, {**AWQ, "group_size": 32}, keep="embed_positions")
    assert distance(logits(driver_of(folder)), reference_logits(plain, TEXT)) < CLOSE


@pytest.mark.parametrize("tied", [True, False])
def test_modules_that_are_not_converted_stay_plain(
    make_model: Make, driver_of: Make, reference_logits: Make, quantize: Packer, tied: bool
) -> None:
    settings = {
        **AWQ,
        "group_size": 64,
        "modules_to_not_convert": ["lm_head", "down_proj", "layers.1.self_attn"],
    }
    source = make_model(**SIZES, tie_word_embeddings=tied)
    folder, plain = quantize(source, settings, keep=r"down_proj|layers\.1\.self_attn")
    driver = driver_of(folder)
    sizes = [[linear.nbytes for linear in layer.linears] for layer in driver.decoder.layers]
    qkv, output, gate_up, down = range(4)
    assert sizes[0][qkv] < 0.2 * sizes[1][qkv]
    assert sizes[0][output] < 0.2 * sizes[1][output]
    assert sizes[0][gate_up] == sizes[1][gate_up]
    assert sizes[0][down] == sizes[1][down] == 4 * 128 * 256
    assert distance(logits(driver), reference_logits(plain, TEXT)) < CLOSE


@pytest.mark.parametrize("settings", [AWQ, GPTQ], ids=["awq", "gptq"])
def test_adapters_are_added_to_what_the_rounded_weights_give(
    make_model: Make,
    driver_of: Make,
    quantize: Packer,
    write_adapter: Make,
    tmp_path: Path,
    settings: dict[str, Any],
) -> None:
    """Adapters beside plain weights are compared with merged weights elsewhere."""
    folder, plain = quantize(make_model(**SIZES), {**settings, "group_size": 64})
    targets = ("q_proj", "o_proj", "up_proj", "down_proj")
    adapters = {"a": str(write_adapter(tmp_path / "a", plain, targets, rank=4, seed=1))}
    beside = driver_of(folder, lora_adapters=adapters)
    base, adapted = beside.logits_in_chunks([TEXT, TEXT], [[4, 3], [6]], adapters=("", "a"))
    exact = driver_of(plain, lora_adapters=adapters)
    _, expected = exact.logits_in_chunks([TEXT, TEXT], [[4, 3], [6]], adapters=("", "a"))
    assert torch.equal(base, logits(driver_of(folder)))
    assert distance(adapted, expected) < CLOSE
    assert distance(base, expected) > 5 * CLOSE, "the adapter changes what is computed"


def test_zero_biases_that_gptq_adds_are_passed_over(
    make_model: Make, driver_of: Make, quantize: Packer
) -> None:
    settings = {**GPTQ, "group_size": 64}
    source = make_model(**SIZES)
    folder, _ = quantize(source, settings)
    expected = logits(driver_of(folder))
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}
    folder, _ = quantize(source, settings, change=lambda tensors: tensors.update(bias))
    assert torch.equal(logits(driver_of(folder)), expected)


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{UP}.scales"), rf"lacks {UP}\.scales$"),
        (lambda t: t.pop(f"{UP}.qzeros"), rf"lacks {UP}\.qzeros$"),
        (
            lambda t: t.update({f"{UP}.weight": torch.zeros(256, 128)}),
            rf"holds {UP}\.weight, which this architecture does not use",
        ),
        (
            lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"].T.contiguous()}),
            rf"{UP}\.qweight has shape \[32, 128\]; config.json asks for \[128, 32\]",
        ),
        (
            lambda t: t.update({f"{UP}.qweight": t[f"{UP}.qweight"].float()}),
            rf"{UP}\.qweight has dtype F32; supported: I32",
        ),
        (
            lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"].int()}),
            rf"{UP}\.scales has dtype I32; supported: F64, F32, F16, BF16",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    make_model: Make,
    driver_of: Make,
    quantize: Packer,
    change: Callable[[dict[str, Tensor]], object],
    message: str,
) -> None:
    folder, _ = quantize(make_model(**SIZES), {**AWQ, "group_size": 64}, change=change)
    with pytest.raises(ModelError, match=message):
        driver_of(folder)


def test_gptq_weights_sorted_by_activation_are_refused(
    make_model: Make, driver_of: Make, quantize: Packer
) -> None:
    settings = {**GPTQ, "group_size": 64, "desc_act": True}
    folder, _ = quantize(make_model(**SIZES), settings)
    logits(driver_of(folder))  # in order, whatever the setting says

    def shuffle(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP}.g_idx"] = tensors[f"{UP}.g_idx"].flip(0).contiguous()

    folder, _ = quantize(make_model(**SIZES), settings, change=shuffle)
    with pytest.raises(ModelError, match=f"{UP}: g_idx sorts the inputs by activation"):
        driver_of(folder)


def test_off_the_cpu_awq_tensors_are_multiplied_as_they_are() -> None:
    projection = QuantizedFormat("awq", 32).projection(["q", "k"])
    assert projection is not None
    weight = QuantizedWeight(projection, 64, 48, torch.device("meta"))
    targets = {(index, kind): part for index, kind, part in weight.targets([32, 16])}
    assert targets[0, "qweight"].shape == (64, 4)
    assert targets[1, "qzeros"].shape == (2, 2)
    assert targets[1, "scales"].shape == (2, 16)
    packed = weight.pack(quantized_weight.HugePages())
    assert isinstance(packed, AwqWeight)
    assert packed.group == 32
    assert packed.nbytes == weight.nbytes


def test_recorded_decodes_give_what_others_give(
    make_model: Make,
    loop_of: Make,
    random_text: Make,
    quantize: Packer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if load_native() is None:
        pytest.skip("no native kernels here")
    monkeypatch.setattr(recorded_decodes, "STEPS_BEFORE", 0)
    repeat, sizes = Recording.repeat, set()

    def counted(recording: Recording) -> Tensor:
        sizes.add(recording.output.shape[0])
        return repeat(recording)

    monkeypatch.setattr(Recording, "repeat", counted)
    folder, _ = quantize(make_model(**SIZES), {**AWQ, "group_size": 64})
    found = []
    for options in ({"enforce_eager": True}, {}):
        loop = loop_of(folder, dtype="bfloat16", **options)
        sequences = [loop.add(random_text(9 + i, i), max_tokens=4 + 3 * i) for i in range(3)]
        loop.run(sequences)
        found.append([loop.results[sequence] for sequence in sequences])
    assert found[0] == found[1]
    assert sizes == {1, 2, 3}
