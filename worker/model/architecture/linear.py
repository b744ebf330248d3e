"""One matrix product with its weight in the form that its device multiplies fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from inferq.kernels.huge_pages import HugePages
from inferq.kernels.matmul import NativeForm, ReadableWeight, Weight, pack_float
from inferq.kernels.matmul_int8 import pack_int8
from inferq.protocol.errors import ModelError
from inferq.worker.model.architecture.lora import AdapterRows, LoraProduct
from inferq.worker.model.architecture.quantized_weight import QuantizedWeight
from inferq.worker.model.loading.quantization import QuantizedProjection

#: Adds to a rank's part of a sum, in place, those of the other ranks.
Reduction = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class LinearMethod:
    """How a model's weights are packed: each by itself, into memory that they share."""

    quantization: str | None = None
    #: Of what they are multiplied with; None: theirs.
    dtype: torch.dtype | None = None
    memory: HugePages = field(default_factory=HugePages)

    def pack(self, weight: Tensor) -> Weight:
        """Return the fastest form of a plain weight [outputs, inputs]."""
        if self.quantization == "int8":
            return pack_int8(weight, self.memory)
        return pack_float(weight, self.memory, self.dtype)


class Linear:
    """y = x · weightᵀ + bias, weight [outputs, inputs].

    The loader fills `weight` and `bias` through views, or `stored` where the checkpoint's weight is
    quantized; `pack` then fixes the layout and lets them go. With `add_up`, this rank has some of
    the inputs: the ranks' products are added up.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        quantized: QuantizedProjection | None = None,
        add_up: Reduction | None = None,
    ) -> None:
        self.outputs = outputs
        self._add_up = add_up
        self.stored: QuantizedWeight | None = None
        if quantized is None:
            self.weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        else:
            self.stored = QuantizedWeight(quantized, inputs, outputs, device)
        self.bias = torch.empty(outputs, dtype=dtype, device=device) if bias else None
        self._packed: Weight | None = None
        #: The same, if its rows can be read: told once, since a protocol's check takes its time.
        self._readable: ReadableWeight | None = None
        #: What adapters add, if there are any for it.
        self.lora: LoraProduct | None = None

    def pack(self, method: LinearMethod) -> None:
        """Fix the weight's form; what it was made of is released, packing again does nothing."""
        if self._packed is not None:
            return
        if self.stored is not None:
            self._packed = self.stored.pack(method.memory)
            self.stored = None
        else:
            self._packed = method.pack(self.weight)
            del self.weight
        self._readable = self._packed if isinstance(self._packed, ReadableWeight) else None
        if self.bias is not None and isinstance(self._packed, NativeForm):
            self.bias = self.bias.float()

    def __call__(self, x: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Multiply x [T, inputs], with the adapters of its rows; returns [T, outputs]."""
        if self._add_up is None:
            return self._adapted(x, self.bias, adapters)
        total = self._adapted(x, None, adapters)
        self._add_up(total)
        return total if self.bias is None else total.add_(self.bias)

    def _adapted(self, x: Tensor, bias: Tensor | None, adapters: AdapterRows | None) -> Tensor:
        out = self._multiply(x, bias)
        if adapters is None or self.lora is None:
            return out
        return self.lora.add(out, x, adapters)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._packed is None:
            return linear(x, self.weight, bias)
        return self._packed.multiply(x, bias)

    @property
    def has_rows(self) -> bool:
        """Whether `rows` can be called: some packed forms hide them."""
        return self._packed is None or self._readable is not None

    def rows(self, indices: Tensor) -> Tensor:
        """Return the weight's rows [T, inputs] at indices [T]."""
        if self._packed is None:
            return embedding(indices, self.weight)
        if self._readable is not None:
            return self._readable.rows(indices)
        raise RuntimeError("the rows of this form cannot be read")

    @property
    def form(self) -> str:
        """The weight's present form, by the name of its class."""
        return "unpacked" if self._packed is None else type(self._packed).__name__

    @property
    def nbytes(self) -> int:
        """Memory of the weight in its present form."""
        if self._packed is not None:
            return self._packed.nbytes
        return self.weight.nbytes if self.stored is None else self.stored.nbytes


def check_quantization(quantization: str | None, device: torch.device) -> None:
    """Raise `ModelError` where a plain model cannot be quantized so on this device."""
    if quantization == "int8" and device.type != "cpu":
        raise ModelError(
            f"{quantization} runs on the CPU only, and the device is {device}", field="quantization"
        )
