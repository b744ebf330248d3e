"""How a checkpoint stores weights of four bits, read from config.json's quantization_config."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from inferq.kernels.awq import GROUPS
from inferq.protocol.errors import ModelError
from inferq.worker.model.architecture.fields import Fields

Method = Literal["awq", "gptq"]
#: Weights in one int32.
PER_WORD: Final = 8
_BITS: Final = 4
#: config.json's name of a GPTQ layout -> what is added to its zeros: the first one stores them less
#: one.
_GPTQ_LAYOUTS: Final = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """The format of a checkpoint's quantized projections; the others are plain."""

    method: Method
    #: Inputs that share a scale and a zero; -1 is all of a projection's.
    group_size: int
    #: Parts of the names of modules that are not quantized.
    unconverted: tuple[str, ...] = ()
    #: What is added to the zeros that are stored.
    zero_offset: int = 0

    @classmethod
    def read(cls, fields: Fields) -> QuantizedFormat:
        """Read the entries of quantization_config; raise `ModelError` for what is not supported."""
        method = fields.get("quant_method")
        if method == "awq":
            return _read_awq(fields)
        if method == "gptq":
            return _read_gptq(fields)
        raise fields.error("quant_method", f"{method!r} is not supported; supported: awq, gptq")

    def describe(self) -> str:
        """Say in a few words what it is, for logs."""
        size = "all inputs" if self.group_size == -1 else str(self.group_size)
        return f"{self.method} in groups of {size}"

    def converts(self, module: str) -> bool:
        """Whether the module of this name is quantized, by AutoAWQ's rule: no part excludes it.

        A number ends where its digits end: layers.1 is not layers.10.
        """
        return not any(
            re.search(re.escape(part) + (r"(?!\d)" if part[-1:].isdigit() else ""), module)
            for part in self.unconverted
        )

    def projection(self, modules: Sequence[str]) -> QuantizedProjection | None:
        """Return how the fused projection of these modules is stored; None: it is plain.

        Raises `ModelError` where some of them are quantized and some are not.
        """
        converted = [self.converts(module) for module in modules]
        if all(converted):
            return QuantizedProjection(self, tuple(modules))
        if any(converted):
            raise ModelError(
                f"config.json: quantization_config: {modules[converted.index(False)]} is in "
                f"modules_to_not_convert and {modules[converted.index(True)]} is not, but they are "
                "computed as one"
            )
        return None


@dataclass(frozen=True, slots=True)
class QuantizedProjection:
    """Quantized modules of a checkpoint that are one product: their outputs follow each other."""

    format: QuantizedFormat
    modules: tuple[str, ...]

    def group_size(self, inputs: int) -> int:
        """Return how many inputs share a scale; raise `ModelError` where groups do not fit."""
        size = inputs if self.format.group_size == -1 else self.format.group_size
        if inputs % size:
            raise ModelError(
                f"{self.modules[0]}: {inputs} inputs cannot be divided into groups of {size}"
            )
        if inputs % PER_WORD:
            raise ModelError(f"{self.modules[0]}: {inputs} inputs are no multiple of {PER_WORD}")
        return size

    def check_outputs(self, sizes: Sequence[int]) -> None:
        """Raise `ModelError` where a module's outputs do not fill whole words."""
        for module, size in zip(self.modules, sizes, strict=True):
            if size % PER_WORD:
                raise ModelError(f"{module}: {size} outputs are no multiple of {PER_WORD}")


def check_quantized_checkpoint(
    stored: QuantizedFormat | None,
    asked: str | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raise `ModelError` where a checkpoint cannot be served as asked, on this device, in `dtype`.

    `asked` is the option `quantization`; None takes the checkpoint as it is.
    """
    if stored is None:
        if asked in ("awq", "gptq"):
            raise ModelError(
                f"{asked} was asked for, but the checkpoint's weights are not quantized: "
                "config.json has no quantization_config",
                field="quantization",
            )
        return
    if asked not in (None, stored.method):
        raise ModelError(
            f"{asked} was asked for, but the checkpoint's weights are {stored.method} already",
            field="quantization",
        )
    if device.type == "cuda" and dtype == torch.float32:
        raise ModelError(
            f"{stored.method} weights are multiplied in float16 or bfloat16 on {device}, not in "
            "float32: set dtype",
            field="dtype",
        )


def _read_awq(fields: Fields) -> QuantizedFormat:
    _check_bits(fields, "bits", "w_bit")
    version = str(fields.get("version", fields.get("format", "gemm"))).lower()
    if version != "gemm":
        raise fields.error("version", f"{version!r} is not supported; supported: 'gemm'")
    if (backend := fields.get("backend")) == "llm-awq":
        raise fields.error("backend", f"{backend!r} is not supported: it packs in another order")
    if not fields.boolean("zero_point", True):
        raise fields.error("zero_point", "weights without zero points are not supported")
    return QuantizedFormat(
        "awq",
        _group_size(fields, "group_size", "q_group_size"),
        unconverted=fields.strings("modules_to_not_convert"),
    )


def _read_gptq(fields: Fields) -> QuantizedFormat:
    _check_bits(fields, "bits")
    layout = fields.get("checkpoint_format", fields.get("format", "gptq"))
    if fields.get("is_marlin_format"):
        layout = "marlin"
    if layout not in _GPTQ_LAYOUTS:
        supported = ", ".join(map(repr, _GPTQ_LAYOUTS))
        raise fields.error(
            "checkpoint_format", f"{layout!r} is not supported; supported: {supported}"
        )
    # Rules for single modules, and a quantized head.
    for name in ("dynamic", "lm_head", "modules_in_block_to_quantize"):
        if value := fields.get(name):
            raise fields.error(name, f"{value!r} is not supported")
    return QuantizedFormat(
        "gptq",
        _group_size(fields, "group_size"),
        unconverted=fields.strings("modules_to_not_convert"),
        zero_offset=_GPTQ_LAYOUTS[layout],
    )


def _check_bits(fields: Fields, *names: str) -> None:
    name = _first_given(fields, names)
    if (bits := fields.get(name, _BITS)) != _BITS:
        raise fields.error(name, f"{bits!r} is not supported; supported: {_BITS}")


def _group_size(fields: Fields, *names: str) -> int:
    name = _first_given(fields, names)
    size = fields.get(name, 128)
    if isinstance(size, bool) or size not in (*GROUPS, -1):
        known = ", ".join(map(str, GROUPS))
        raise fields.error(name, f"{size!r} is not supported; supported: {known}, -1")
    return int(size)


def _first_given(fields: Fields, names: Sequence[str]) -> str:
    """Return the name that is used, of several for one setting."""
    return next((name for name in names if fields.get(name) is not None), names[0])
