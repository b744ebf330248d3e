"""Gated activations."""

import torch
from torch import Tensor
from torch.nn import functional

from inferq.kernels.dispatch import native_for, runs_triton
from inferq.kernels.native.library import DTYPE_CODES


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) · up from [..., 2 · I] (gate, then up, in each row) to [..., I]."""
    if runs_triton(gate_up):
        from inferq.kernels import triton_activation

        return triton_activation.silu_and_mul(gate_up)
    if (result := _native("inferq_silu_and_mul", gate_up)) is not None:
        return result
    gate, up = gate_up.chunk(2, dim=-1)
    # In place: 285 against 360 us for [512, 3072] float32 on 2 Zen 4 cores.
    return functional.silu(gate).mul_(up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute gelu(gate) · up like `silu_and_mul`, GELU by its tanh approximation."""
    if runs_triton(gate_up):
        from inferq.kernels import triton_activation

        return triton_activation.gelu_and_mul(gate_up)
    if (result := _native("inferq_gelu_and_mul", gate_up)) is not None:
        return result
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def _native(name: str, gate_up: Tensor) -> Tensor | None:
    """Run the native kernel on [T, 2 · I]; None where it cannot run."""
    kernel = native_for(gate_up, name, "ppllli")
    if kernel is None or gate_up.dim() != 2:
        return None
    rows, width = gate_up.shape
    out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
    kernel(
        gate_up.data_ptr(),
        out.data_ptr(),
        rows,
        width // 2,
        gate_up.stride(0),
        DTYPE_CODES[gate_up.dtype],
    )
    return out
