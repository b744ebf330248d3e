"""Section: AWQ weights against their plain dequantization."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from gpu.records import Quantity, Record, Target
from gpu.section import Case, Settings, each

#: Norm of the difference over the norm of the truth: rounding of weights and output.
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-3}
#: AutoAWQ's order of the eight 4-bit values of an int32, lowest bits first.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 128


def random_awq(
    inputs: int, outputs: int, group: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Make up qweight [K, N/8], qzeros [K/G, N/8] and scales [K/G, N]."""
    groups = inputs // group
    qweight = torch.randint(-(2**31), 2**31 - 1, (inputs, outputs // 8), device=device)
    qzeros = torch.randint(-(2**31), 2**31 - 1, (groups, outputs // 8), device=device)
    scales = (0.5 + torch.rand(groups, outputs, device=device)) * inputs**-0.5 / 8
    return qweight.int(), qzeros.int(), scales.to(dtype)


def unpacked(packed: Tensor) -> Tensor:
    """Give the 4-bit values [.., N] of int32 [.., N/8], in the order of the columns."""
    shifts = torch.tensor([4 * _ORDER.index(column) for column in range(8)], device=packed.device)
    return ((packed[..., None].long() >> shifts) & 15).flatten(-2)


def dequantized(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> Tensor:
    """Give the float32 weights [K, N], written out."""
    zeros = unpacked(qzeros).repeat_interleave(group, dim=0)
    wide = scales.float().repeat_interleave(group, dim=0)
    return (unpacked(qweight) - zeros).float() * wide


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases: sizes of Llama-3-8B's products at several batch sizes."""
    dtypes = [torch.float32] if settings.smoke else [torch.float16, torch.bfloat16]
    sizes = [(64, 64)] if settings.smoke else [(4096, 6144), (4096, 28672), (14336, 4096)]
    group = 32 if settings.smoke else GROUP
    for dtype in dtypes:
        for inputs, outputs in sizes:
            name = f"{inputs} to {outputs}, {str(dtype).removeprefix('torch.')}"
            case = f"awq_dequantize, {name}"
            yield each(case, partial(_dequantize, case, (inputs, outputs), group, dtype, settings))
            for rows in (2,) if settings.smoke else (1, 7, 16, 64, 300):
                case = f"awq_linear, {rows} rows, {name}"
                yield each(
                    case, partial(_linear, case, rows, (inputs, outputs), group, dtype, settings)
                )


def _dequantize(
    name: str, size: tuple[int, int], group: int, dtype: torch.dtype, settings: Settings
) -> Record:
    from inferq.kernels.awq import awq_dequantize

    packed = random_awq(*size, group, dtype, settings.device)
    return _record(name, awq_dequantize(*packed, group), dequantized(*packed, group), dtype)


def _linear(
    name: str, rows: int, size: tuple[int, int], group: int, dtype: torch.dtype, settings: Settings
) -> Record:
    from inferq.kernels.awq import awq_linear

    packed = random_awq(*size, group, dtype, settings.device)
    x = torch.randn(rows, size[0], device=settings.device).to(dtype)
    expected = x.float() @ dequantized(*packed, group).to(dtype).float()
    return _record(name, awq_linear(x, *packed, group), expected, dtype)


def _record(name: str, found: Tensor, expected: Tensor, dtype: torch.dtype) -> Record:
    if found.shape != expected.shape or found.dtype != dtype:
        raise RuntimeError(f"{tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)}")
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return Record(
        name,
        {"error": Quantity(float(error), "norm of the difference over the norm")},
        Target("error", at_most=TOLERANCES[dtype]),
    )
