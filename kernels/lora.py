"""What low-rank adapters add to a product, on the CPU: each row meets its own adapter only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from inferq.kernels.matmul import dense_rows, native_kernel
from inferq.kernels.native.library import DTYPE_CODES, native_function

_ADD = ("inferq_lora_add", "plplplplpplppli")


@dataclass(frozen=True, slots=True)
class NativeLora:
    """All adapters of one product, for the kernel of `native/lora.cpp`."""

    down: Tensor
    """[parts · ranks, inputs]: each part's A, those of all adapters below each other."""
    up: Tensor
    """The parts' Bᵀ [ranks, outputs of the part], one after the other."""
    starts: Tensor
    """int64 [adapters + 1]: the first rank of each adapter, then their number."""
    firsts: Tensor
    """int64 [parts]: the first output of each part."""
    sizes: Tensor
    """int64 [parts]: its outputs."""

    def add(self, out: Tensor, x: Tensor, adapters: Tensor) -> Tensor:
        """Add to out [T, outputs] what adapters [T], int64, make of x [T, inputs]; 0 is none."""
        x = dense_rows(x, self.down.dtype)
        native_kernel(*_ADD)(
            out.data_ptr(),
            out.stride(0),
            x.data_ptr(),
            x.stride(0),
            adapters.data_ptr(),
            x.shape[0],
            self.starts.data_ptr(),
            self.starts.numel() - 1,
            self.down.data_ptr(),
            self.up.data_ptr(),
            x.shape[1],
            self.firsts.data_ptr(),
            self.sizes.data_ptr(),
            self.sizes.numel(),
            DTYPE_CODES[x.dtype],
        )
        return out


def pack_lora(
    down: Tensor, ups: Sequence[tuple[int, Tensor]], ranks: Sequence[int]
) -> NativeLora | None:
    """Return the native form, None where there is none for the device or dtype.

    `down` is [parts · ranks, inputs]; `ups` has each part's first output and B [outputs, ranks];
    `ranks` are the adapters', one after the other.
    """
    has_code = down.device.type == "cpu" and down.dtype in DTYPE_CODES
    if not has_code or native_function(*_ADD) is None:
        return None
    return NativeLora(
        down.contiguous(),
        torch.cat([up.T.flatten() for _, up in ups]),
        torch.tensor([0, *accumulate(ranks)]),
        torch.tensor([first for first, _ in ups]),
        torch.tensor([len(up) for _, up in ups]),
    )
