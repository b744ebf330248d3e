"""One matrix product with its weight in the form that its device multiplies fastest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


class Linear:
    """y = x · weightᵀ + bias, weight [outputs, inputs].

    The loader fills `weight` and `bias` through views; `pack` then fixes the layout.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.weight = torch.empty(outputs, inputs, dtype=dtype, device=device)
        self.bias = torch.empty(outputs, dtype=dtype, device=device) if bias else None
        self._is_packed = False

    def pack(self) -> None:
        """Let oneDNN lay the weight out in its tiles, where that runs: float32 on the CPU.

        Reordered once rather than on every call: 1.4 to 2.4 times as fast for up to 128 rows.
        The plain weight is released.
        """
        if not self._is_packed and _can_pack(self.weight):
            reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 - torch.compile's own
            self.weight = reorder(self.weight)
            self._is_packed = True

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, inputs]; returns [T, outputs]."""
        if self._is_packed and x.shape[0]:
            multiply = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - torch.compile's own
            product: Tensor = multiply(x, self.weight, self.bias, "none", [], "")
            return product
        if self._is_packed:
            return x.new_empty(0, self.weight.shape[0])
        return linear(x, self.weight, self.bias)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
