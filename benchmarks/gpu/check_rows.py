"""Section: norms, rotary embedding, activations and block copies against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from gpu.records import Quantity, Record, Target
from gpu.section import Case, Settings, each
from inferq.kernels import reference

#: Largest difference as a share of the larger magnitude: one rounding of the output's type, and the
#: order of the additions.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases: every kernel, type and a few sizes, some of no power of two."""
    dtypes = [torch.float32] if settings.smoke else list(TOLERANCES)
    rows = (3,) if settings.smoke else (1, 257)
    for dtype in dtypes:
        for count in rows:
            label = f"{str(dtype).removeprefix('torch.')}, {count} rows"
            for kernel, compare in _COMPARISONS.items():
                name = f"{kernel}, {label}"
                yield each(name, partial(_compare, name, compare, settings, dtype, count))
    yield each("block moves", lambda: _block_moves(settings))
    yield each("block copies", lambda: _block_copies(settings))


Pairs = list[tuple[Tensor, Tensor]]
Comparison = Callable[[Settings, torch.dtype, int], Pairs]


def _compare(
    name: str, compare: Comparison, settings: Settings, dtype: torch.dtype, rows: int
) -> Record:
    """Compare what the kernel gave with what it should; NaN in either fails."""
    worst = 0.0
    for found, expected in compare(settings, dtype, rows):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            raise RuntimeError(f"{found.shape} {found.dtype}, not {expected.shape}")
        wide, truth = found.double(), expected.double()
        error = ((wide - truth).abs() / truth.abs().clamp_min(1.0)).max()
        worst = max(worst, float("inf") if error.isnan() else float(error))
    return Record(
        name,
        {"error": Quantity(worst, "largest relative (absolute below 1)")},
        Target("error", at_most=TOLERANCES[dtype]),
    )


def _sizes(settings: Settings) -> tuple[int, ...]:
    return (64, 96) if settings.smoke else (64, 576, 1024, 4096, 8192, 14336)


def _values(settings: Settings, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=settings.device).to(dtype)


def _norms(settings: Settings, dtype: torch.dtype, rows: int) -> Pairs:
    from inferq.kernels import triton_norm

    pairs: Pairs = []
    for size in _sizes(settings):
        x = _values(settings, dtype, rows, size)
        weights = (_values(settings, dtype, size), torch.rand(size, device=settings.device))
        pairs += [
            (triton_norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
            for weight in weights
        ]
    return pairs


def _added_norms(settings: Settings, dtype: torch.dtype, rows: int) -> Pairs:
    from inferq.kernels import triton_norm

    pairs: Pairs = []
    for size in _sizes(settings):
        x, residual = (_values(settings, dtype, rows, size) for _ in range(2))
        weight = _values(settings, dtype, size)
        expected = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
        pairs += zip(triton_norm.add_rms_norm(x, residual, weight, 1e-5), expected, strict=True)
    return pairs


def _head_norms(settings: Settings, dtype: torch.dtype, rows: int) -> Pairs:
    """Norm the heads of a view of the fused projection, as Qwen3 does."""
    from inferq.kernels import triton_norm

    qkv = _values(settings, dtype, rows, 6, 128)
    weight = _values(settings, dtype, 128)
    heads = qkv[:, 1:4]
    return [(triton_norm.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))]


def _rotary(settings: Settings, dtype: torch.dtype, rows: int) -> Pairs:
    from inferq.kernels import triton_rotary

    pairs: Pairs = []
    for dim, turned in ((64, 64), (80, 80), (128, 128), (128, 64)):
        qkv = _values(settings, dtype, rows, 4 + 2 + 2, dim)
        query, key, _ = torch.split(qkv, [4, 2, 2], dim=1)
        angles = torch.rand(rows, turned // 2, device=settings.device) * 100
        expected = reference.rotary(query, key, angles.cos(), angles.sin())
        pairs += zip(
            triton_rotary.rotary(query, key, angles.cos(), angles.sin()), expected, strict=True
        )
    return pairs


def _activations(settings: Settings, dtype: torch.dtype, rows: int) -> Pairs:
    from inferq.kernels import triton_activation

    pairs = []
    for size in _sizes(settings):
        gate_up = 3 * _values(settings, dtype, rows, 2 * size)
        for name in ("silu_and_mul", "gelu_and_mul"):
            found = getattr(triton_activation, name)(gate_up)
            pairs.append((found, getattr(reference, name)(gate_up)))
    return pairs


_COMPARISONS: dict[str, Comparison] = {
    "rms_norm": _norms,
    "add_rms_norm": _added_norms,
    "rms_norm of heads": _head_norms,
    "rotary": _rotary,
    "silu_and_mul, gelu_and_mul": _activations,
}


def _block_moves(settings: Settings) -> Record:
    """Swap blocks out, copy others over them, swap them back: all must be what they were."""
    from inferq.worker.engine.scheduling.plan import BlockCopy, StepPlan
    from inferq.worker.model.running.block_moves import BlockMover

    count, before, blocks = _blocks(settings)
    host_blocks = torch.zeros_like(blocks[:count], device="cpu")
    if settings.device.type == "cuda":
        host_blocks = host_blocks.pin_memory()
    places = torch.randperm(count).tolist()
    mover = BlockMover(blocks, host_blocks)
    out = [BlockCopy(block, place) for block, place in enumerate(places)]
    copies = [BlockCopy(count + block, block) for block in range(count)]
    for plan in (StepPlan([], swap_out=out), StepPlan([], block_copies=copies)):
        mover.start(plan)
        mover.finish(plan)
    copied = bool((blocks[:count] == before[count : 2 * count]).all())
    plan = StepPlan([], swap_in=[BlockCopy(place, block) for block, place in out])
    mover.start(plan)
    mover.finish(plan)
    same = bool((blocks == before).all())
    return Record(
        "block moves",
        {"blocks": Quantity(count), "same": Quantity(same and copied)},
        Target("same", at_least=1),
    )


def _block_copies(settings: Settings) -> Record:
    """Copy blocks in a chain, then gather and scatter them, against plain indexing."""
    from inferq.kernels.triton_block_copy import copy_blocks, gather_blocks, scatter_blocks

    count, before, blocks = _blocks(settings)
    copy_blocks(blocks, [(0, 1), (1, 2), (count, 0)])
    expected = before.clone()
    expected[1] = expected[2] = before[0]
    expected[0] = before[count]
    same = bool((blocks == expected).all())
    index = torch.randperm(3 * count, device=settings.device)[:count]
    staging = torch.zeros_like(blocks[:count])
    gather_blocks(blocks, index, staging)
    same = same and bool((staging == expected[index]).all())
    scatter_blocks(staging, index.flip(0), blocks)
    expected[index.flip(0)] = staging
    same = same and bool((blocks == expected).all())
    return Record("block copies", {"same": Quantity(same)}, Target("same", at_least=1))


def _blocks(settings: Settings) -> tuple[int, Tensor, Tensor]:
    """Give a third of a pool's blocks, and the pool's values twice."""
    shape = (12, 3, 2, 4, 2, 8) if settings.smoke else (600, 32, 2, 16, 8, 128)
    blocks = torch.randn(*shape, device=settings.device).to(settings.dtype)
    return shape[0] // 3, blocks.clone(), blocks
