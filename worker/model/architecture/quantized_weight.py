"""A quantized weight between a checkpoint's tensors and the form that its device multiplies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from inferq.kernels.awq import AwqWeight, pack_awq_words, unpack_awq_words
from inferq.kernels.gptq import unpack_gptq
from inferq.kernels.huge_pages import HugePages
from inferq.kernels.matmul import Weight
from inferq.kernels.matmul_int4 import pack_int4
from inferq.protocol.errors import ModelError
from inferq.worker.model.loading.quantization import PER_WORD, Method, QuantizedProjection


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How one tensor of a quantized module is laid out, [inputs, outputs]."""

    #: Inputs for each row; None: a group.
    inputs: int | None
    #: Outputs for each column; None: it has no columns.
    outputs: int | None


#: A module's tensors, by the last part of their names.
LAYOUTS: Final[Mapping[Method, Mapping[str, TensorLayout]]] = {
    "awq": {
        "qweight": TensorLayout(1, PER_WORD),
        "qzeros": TensorLayout(None, PER_WORD),
        "scales": TensorLayout(None, 1),
    },
    "gptq": {
        "qweight": TensorLayout(PER_WORD, 1),
        "qzeros": TensorLayout(None, PER_WORD),
        "scales": TensorLayout(None, 1),
        "g_idx": TensorLayout(1, None),
    },
}


class QuantizedWeight:
    """The tensors of a fused projection [outputs, inputs], which the loader fills through views."""

    def __init__(
        self, projection: QuantizedProjection, inputs: int, outputs: int, device: torch.device
    ) -> None:
        self._projection = projection
        self._group = projection.group_size(inputs)
        self._tensors = {
            kind: self._empty(kind, layout, inputs, outputs, device)
            for kind, layout in LAYOUTS[projection.format.method].items()
        }

    def _empty(
        self, kind: str, layout: TensorLayout, inputs: int, outputs: int, device: torch.device
    ) -> Tensor:
        # Scales of either 16-bit type are exact in float32.
        dtype = torch.float32 if kind == "scales" else torch.int32
        rows = inputs // (layout.inputs or self._group)
        if layout.outputs is None:
            return torch.empty(len(self._projection.modules), rows, dtype=dtype, device=device)
        return torch.empty(rows, outputs // layout.outputs, dtype=dtype, device=device)

    def targets(self, sizes: Sequence[int]) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (index of the module, kind, what the tensor fills), given each module's outputs."""
        self._projection.check_outputs(sizes)
        layouts = LAYOUTS[self._projection.format.method]
        for kind, tensor in self._tensors.items():
            per_column = layouts[kind].outputs
            if per_column is None:
                parts = list(tensor)
            else:
                parts = list(torch.split(tensor, [size // per_column for size in sizes], dim=1))
            yield from ((index, kind, part) for index, part in enumerate(parts))

    def pack(self, memory: HugePages) -> Weight:
        """Return the form that the device multiplies."""
        tensors, group = self._tensors, self._group
        if self._projection.format.method == "gptq":
            self._check_order(tensors["g_idx"])
            values, zeros = unpack_gptq(
                tensors["qweight"], tensors["qzeros"], self._projection.format.zero_offset
            )
        elif tensors["qweight"].is_cpu:
            values = unpack_awq_words(tensors["qweight"])
            zeros = unpack_awq_words(tensors["qzeros"])
        else:
            return AwqWeight(tensors["qweight"], tensors["qzeros"], tensors["scales"], group)
        if values.is_cpu:
            return pack_int4(values, tensors["scales"].T, zeros, group, memory)
        words, zero_words = pack_awq_words(values.T), pack_awq_words(zeros.T)
        return AwqWeight(words, zero_words, tensors["scales"], group)

    def _check_order(self, groups: Tensor) -> None:
        """Raise `ModelError` unless the inputs of a group are neighbours, in the groups' order."""
        inputs = groups.shape[1]
        expected = torch.arange(inputs, dtype=groups.dtype, device=groups.device) // self._group
        for module, found in zip(self._projection.modules, groups, strict=True):
            if not torch.equal(found - found[0], expected):
                raise ModelError(
                    f"{module}: g_idx sorts the inputs by activation (desc_act), which is not "
                    "supported"
                )

    @property
    def nbytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())
