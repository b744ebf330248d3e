"""Section: attention and KV writes against the reference, over a cache that is NaN where unused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpu.paged_case import LLAMA, Heads, batch_of, shuffled_tables
from gpu.records import Quantity, Record, Target
from gpu.section import Case, Settings, each
from inferq.kernels.attention import AttentionBatch, AttentionOps
from inferq.kernels.reference import ReferenceAttention
from inferq.kernels.triton_attention import TritonAttention, Tuning

#: Largest absolute difference: weights rounded to the cache's type before the second product, and
#: the output; for float32 the order of additions and three tf32 products for one.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_PADDING = (-1, 1)
_DECODES = ((0, 1), (15, 1), (16, 1), (700, 1), _PADDING, (2999, 1), (63, 1))
_PREFILLS = ((0, 1 + 129), (3, 64), (300, 77), (0, 15))
_MIXED = ((0, 1), _PADDING, (1200, 1), (99, 1), (50, 60), (0, 200))
#: Blocks beyond 2^31 elements of a Llama-3-8B cache.
_FAR_BLOCKS = 2400


@dataclass(frozen=True, slots=True)
class _Shape:
    """What one case attends to."""

    sequences: Sequence[tuple[int, int]]
    heads: Heads = LLAMA
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    soft_cap: float | None = None
    block_size: int = 16
    #: Blocks of the pool that lie before those that are used.
    first_block: int = 0
    layers: int = 2


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases: every head size and type, groups, windows, caps, blocks, far addresses."""
    for name, shape in _shapes(settings).items():
        yield each(name, partial(_compare, name, shape, settings.device))
    yield each("decodes are the same at any batch size", lambda: _alone(settings))


def _shapes(settings: Settings) -> dict[str, _Shape]:
    if settings.smoke:
        small = Heads(4, 2, 64)
        return {
            "mixed float32": _Shape(((0, 1), _PADDING, (40, 1), (9, 20)), small, torch.float32),
            "mixed float16 window cap": _Shape(
                ((33, 1), (5, 17)), small, torch.float16, window=9, soft_cap=5.0
            ),
        }
    shapes = {
        "decode bfloat16": _Shape(_DECODES),
        "prefill bfloat16": _Shape(_PREFILLS),
        "mixed bfloat16": _Shape(_MIXED),
        "mixed bfloat16, window 128": _Shape(_MIXED, window=128),
        "mixed bfloat16, window 100, soft cap 5": _Shape(_MIXED, window=100, soft_cap=5.0),
        "mixed bfloat16, soft cap 30": _Shape(_MIXED, soft_cap=30.0),
        "mixed, cache beyond 2^31 elements": _Shape(_MIXED, first_block=_FAR_BLOCKS, layers=32),
        "64 decodes, split": _Shape([(37 * index, 1) for index in range(64)]),
    }
    for dtype in (torch.float16, torch.float32):
        shapes[f"mixed {_name(dtype)}"] = _Shape(_MIXED, dtype=dtype)
    for dim in (64, 80, 96, 256):
        shapes[f"mixed bfloat16, head size {dim}"] = _Shape(_MIXED, Heads(8, 2, dim))
    for heads in (Heads(8, 8), Heads(14, 2, 64), Heads(8, 1), Heads(16, 8)):
        name = f"mixed bfloat16, {heads.query} heads over {heads.kv} of {heads.dim}"
        shapes[name] = _Shape(_MIXED, heads)
    for block_size in (8, 32, 128):
        shapes[f"mixed bfloat16, blocks of {block_size}"] = _Shape(_MIXED, block_size=block_size)
    return shapes


def agreement(
    name: str,
    sequences: Sequence[tuple[int, int]],
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    tuning: Tuning,
) -> Record:
    """Compare the kernels under a tuning with the reference."""
    return _compare(name, _Shape(sequences, heads, dtype), device, tuning)


def _compare(
    name: str, shape: _Shape, device: torch.device, tuning: Tuning | None = None
) -> Record:
    batch, cache, qkv = _inputs(shape, device)
    outputs, caches = [], []
    # Compared on the same inputs: the reference reads the cache that it has itself written.
    forms: tuple[AttentionOps, ...] = (TritonAttention(device, tuning), ReferenceAttention())
    for form in forms:
        written = cache.clone()
        outputs.append(_attend(form, batch, written[:, -1], qkv, shape))
        caches.append(written)
    output, expected = outputs
    different = int((~_same(*caches)).sum())
    error = float((output.float() - expected.float()).abs().max())
    if expected.isnan().any():
        raise RuntimeError("the reference gave NaN: the case itself is wrong")
    return Record(
        name,
        {
            "error": Quantity(error, "largest absolute"),
            "cache_elements_that_differ": Quantity(different),
            "fits": Quantity(different == 0 and error <= TOLERANCES[shape.dtype]),
            "tolerance": Quantity(TOLERANCES[shape.dtype]),
        },
        Target("fits", at_least=1),
    )


def _inputs(shape: _Shape, device: torch.device) -> tuple[AttentionBatch, Tensor, Tensor]:
    heads, block_size = shape.heads, shape.block_size
    tables, pool = shuffled_tables(shape.sequences, block_size, device)
    tables += shape.first_block
    batch = batch_of(shape.sequences, tables, block_size)
    size = (pool + shape.first_block, shape.layers, 2, block_size, heads.kv, heads.dim)
    cache = torch.full(size, torch.nan, dtype=shape.dtype, device=device)
    for row, (context, _) in zip(tables.long(), shape.sequences, strict=True):
        if context > 0:
            positions = torch.arange(context, device=device)
            blocks = row[positions // block_size]
            values = torch.randn(context, 2, heads.kv, heads.dim, device=device)
            cache[blocks, -1, :, positions % block_size] = values.to(shape.dtype)
    tokens = sum(batch.query_lens)
    qkv = torch.randn(tokens, heads.query + 2 * heads.kv, heads.dim, device=device)
    return batch, cache, qkv.to(shape.dtype)


def _attend(
    ops: AttentionOps, batch: AttentionBatch, layer: Tensor, qkv: Tensor, shape: _Shape
) -> Tensor:
    heads = shape.heads
    query, key, value = torch.split(qkv, [heads.query, heads.kv, heads.kv], dim=1)
    plan = ops.plan(batch)
    ops.write_kv(key, value, layer, plan)
    return ops.attend(
        query,
        layer,
        plan,
        scale=heads.dim**-0.5,
        window=shape.window,
        soft_cap=shape.soft_cap,
    )


def _same(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())


def _alone(settings: Settings) -> Record:
    """Compare each decode of a batch with the same decode alone: bit for bit is not promised."""
    heads = Heads(4, 2, 64) if settings.smoke else LLAMA
    dtype = torch.float32 if settings.smoke else torch.bfloat16
    sequences = [(20, 1), (3, 1)] if settings.smoke else [(997, 1), (15, 1), (2500, 1), (400, 1)]
    shape = _Shape(sequences, heads, dtype)
    batch, cache, qkv = _inputs(shape, settings.device)
    ops = TritonAttention(settings.device)
    together = _attend(ops, batch, cache[:, -1], qkv, shape)
    largest = 0.0
    for index, sequence in enumerate(sequences):
        single = batch_of([sequence], batch.block_tables[index : index + 1], shape.block_size)
        row = slice(index, index + 1)
        alone = _attend(ops, single, cache[:, -1], qkv[row], shape)
        largest = max(largest, float((alone.float() - together[row].float()).abs().max()))
    return Record(
        "decodes are the same at any batch size",
        {"error": Quantity(largest, "largest absolute")},
        Target("error", at_most=TOLERANCES[dtype]),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
