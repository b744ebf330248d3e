"""Triton: copy, gather and scatter blocks of the KV cache, one launch for all of them."""

# Triton's language has no types for mypy to check.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="untyped-decorator"

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferq.kernels.triton_pages import FP_FUSION

# Bytes moved by one program, whatever the architecture. Not measured yet.
_TILE_BYTES = 16384
_WARPS = 8
_WIDE = 8  # bytes of an element that blocks are moved by: two of them are one access


@triton.jit
def _copy_kernel(
    target_ptr,
    source_ptr,
    target_index_ptr,
    source_index_ptr,
    SIZE: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    TILE: tl.constexpr,
):
    move = tl.program_id(0).to(tl.int64)
    source, target = move, move
    if GATHER:
        source = tl.load(source_index_ptr + move)
    if SCATTER:
        target = tl.load(target_index_ptr + move)
    places = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = places < SIZE
    values = tl.load(source_ptr + source * SIZE + places, mask=mask)
    tl.store(target_ptr + target * SIZE + places, values, mask=mask)


def copy_constants(size: int, *, gather: bool, scatter: bool) -> dict[str, Any]:
    """Give the compile-time constants and launch options for blocks of so many elements."""
    return {
        "SIZE": size,
        "GATHER": gather,
        "SCATTER": scatter,
        "TILE": _TILE_BYTES // _WIDE,
        "num_warps": _WARPS,
        **FP_FUSION,
    }


def copy_blocks(blocks: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks of [B, ...] from source to target, as if one move after the other."""
    for independent in _independent(moves):
        index = torch.tensor(independent, dtype=torch.int64).t().contiguous()
        if blocks.is_cuda:
            index = index.pin_memory().to(blocks.device, non_blocking=True)
        _launch(blocks, blocks, index[1], index[0])


def gather_blocks(blocks: Tensor, index: Tensor, staging: Tensor) -> None:
    """Copy the blocks of int64 index [N], on the device, to the first N of staging [M, ...]."""
    _launch(staging, blocks, None, index)


def scatter_blocks(staging: Tensor, index: Tensor, blocks: Tensor) -> None:
    """Copy the first N of staging [M, ...] to the blocks of int64 index [N], each named once."""
    _launch(blocks, staging, index, None)


def _independent(moves: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Split moves into runs that may be done in any order; nearly always one."""
    run: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in moves:
        if source in written or target in read or target in written:
            yield run
            run, read, written = [], set(), set()
        run.append((source, target))
        read.add(source)
        written.add(target)
    if run:
        yield run


def _launch(
    target: Tensor, source: Tensor, target_index: Tensor | None, source_index: Tensor | None
) -> None:
    index = target_index if target_index is not None else source_index
    assert index is not None
    if target.shape[1:] != source.shape[1:] or target.dtype != source.dtype:
        raise ValueError(
            f"blocks of {list(target.shape[1:])} {target.dtype} and {list(source.shape[1:])} "
            f"{source.dtype} are not alike"
        )
    target, source = _words(target), _words(source)
    size = target.shape[1]
    constants = copy_constants(
        size, gather=source_index is not None, scatter=target_index is not None
    )
    if index.numel():
        _copy_kernel[(index.numel(), triton.cdiv(size, constants["TILE"]))](
            target,
            source,
            index if target_index is None else target_index,
            index if source_index is None else source_index,
            **constants,
        )


def _words(blocks: Tensor) -> Tensor:
    """View blocks as [B, words] of 8 bytes, whatever they hold."""
    size = blocks[0].numel() * blocks.element_size()
    if not blocks.is_contiguous() or size % (2 * _WIDE):
        raise ValueError(
            f"blocks must be contiguous and hold a multiple of {2 * _WIDE} bytes, not {size}"
        )
    return blocks.flatten(1).view(torch.int64)
