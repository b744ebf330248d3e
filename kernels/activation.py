"""Gated activations."""

from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) · up from [..., 2 · I] (gate, then up, in each row) to [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    # In place: 285 against 360 us for [512, 3072] float32 on 2 Zen 4 cores.
    return functional.silu(gate).mul_(up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute gelu(gate) · up like `silu_and_mul`, GELU by its tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)
