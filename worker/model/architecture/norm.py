"""Normalisation layers: the root mean square kind, and the older one with mean and bias."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from inferq.kernels.norm import add_rms_norm, rms_norm
from inferq.worker.model.architecture.config import ModelConfig


class Norm:
    """Normalises rows [T, size] and scales them; `pack` must follow the loading of the weight.

    Weights that are stored less one are kept in float32: near -1 a 16-bit sum loses digits.
    """

    def __init__(
        self, config: ModelConfig, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._eps = config.norm_eps
        self._offset = config.family.norm_offset
        dtype = torch.float32 if self._offset else dtype
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.bias: Tensor | None = None
        if config.family.norm == "layer":
            self.bias = torch.empty(size, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the rows of x [T, size], or its heads [T, heads, size] each by itself."""
        if self.bias is None:
            return rms_norm(x, self.weight, self._eps)
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised sum and the sum, for which `residual` may be overwritten."""
        if self.bias is None:
            return add_rms_norm(x, residual, self.weight, self._eps)
        residual = residual + x
        return self(residual), residual

    def pack(self) -> None:
        """Add what the stored weight lacks, once."""
        if self._offset:
            self.weight += self._offset
            self._offset = 0.0

    def targets(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors of the norm `name` and what they fill."""
        yield f"{name}.weight", self.weight
        if self.bias is not None:
            yield f"{name}.bias", self.bias
