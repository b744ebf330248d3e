"""Paged attention on the CPU in C++: pages are read where they lie (`native/attention.cpp`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from inferq.kernels.attention import AttentionBatch, AttentionPlan, check_shapes
from inferq.kernels.native.library import DTYPE_CODES, NativeLibrary

_NO_WINDOW = 2**31 - 1


@dataclass(frozen=True, slots=True)
class NativePlan(AttentionPlan):
    """The batch's tables in the form that the kernels read; they derive the rest themselves."""

    query_starts: Tensor  # int32 [S + 1]
    seq_lens: Tensor  # int32 [S]
    block_tables: Tensor  # int32 [S, max_blocks]
    slots: Tensor  # int64 [T]
    num_blocks: int
    """Blocks that a cache must have for this batch: a kernel would write beyond it."""
    shared: dict[int, Tensor | None] = field(default_factory=dict)
    """By query heads of a KV head: `NativeAttention.shared_prefixes`, None where there are none."""


class NativeAttention:
    """The form for CPUs with a C++ compiler."""

    name = "native"

    def __init__(self, library: NativeLibrary) -> None:
        self._attend = library.function("inferq_attend", "p" * 8 + "l" * 14 + "ffii")
        self._find_shared = library.function("inferq_shared_prefixes", "pppllllpp")
        self._write_kv = library.function("inferq_write_kv", "pppp" + "l" * 12 + "ii")

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Check the batch's tables, which the kernels trust."""
        slots = batch.slot_mapping.contiguous()
        last_slot = int(slots.max()) if slots.numel() else -1
        last_block = last_slot // batch.block_size
        if batch.block_tables.numel():
            last_block = max(last_block, int(batch.block_tables.max()))
        return NativePlan(
            batch=batch,
            query_starts=batch.query_starts.int().contiguous(),
            seq_lens=batch.seq_lens.int().contiguous(),
            block_tables=batch.block_tables.int().contiguous(),
            slots=slots,
            num_blocks=last_block + 1,
        )

    def write_kv(self, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> None:
        """Store each token's key and value at its slot; slot -1 is skipped."""
        own = checked_plan(plan, kv_layer)
        key, value = _dense_heads(key), _dense_heads(value)
        tokens, kv_heads, head_dim = key.shape
        self._write_kv(
            key.data_ptr(),
            value.data_ptr(),
            kv_layer.data_ptr(),
            own.slots.data_ptr(),
            tokens,
            *key.stride()[:2],
            *value.stride()[:2],
            *kv_layer.stride()[:4],
            kv_heads,
            head_dim,
            own.batch.block_size,
            DTYPE_CODES[key.dtype],
            DTYPE_CODES[kv_layer.dtype],
        )

    def attend(
        self,
        query: Tensor,
        kv_layer: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Attend causally over the cached tokens of each sequence; padding rows give zeros."""
        check_shapes(query, kv_layer, plan.batch)
        own = checked_plan(plan, kv_layer)
        query = _dense_heads(query)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        group = query.shape[1] // kv_layer.shape[3]
        if group not in own.shared:
            own.shared[group] = self.shared_prefixes(own, group)
        shared = own.shared[group]
        self._attend(
            query.data_ptr(),
            out.data_ptr(),
            kv_layer.data_ptr(),
            own.query_starts.data_ptr(),
            own.seq_lens.data_ptr(),
            own.block_tables.data_ptr(),
            0 if shared is None else shared[0].data_ptr(),
            0 if shared is None else shared[1].data_ptr(),
            own.block_tables.shape[1],
            own.seq_lens.shape[0],
            own.batch.num_decodes,
            *query.stride()[:2],
            *query.shape[1:],
            *kv_layer.stride()[:4],
            kv_layer.shape[3],
            own.batch.block_size,
            _NO_WINDOW if window is None else window,
            scale,
            soft_cap or 0.0,
            DTYPE_CODES[query.dtype],
            DTYPE_CODES[kv_layer.dtype],
        )
        return out

    def shared_prefixes(self, plan: NativePlan, group: int) -> Tensor | None:
        """Find sequences whose first tokens lie in the same blocks, for `group` query heads each.

        Returns int32 [2, S]: the first sequence of each one's group, and the tokens that the group
        shares, 0 where there is no such group; None for what has no use for it.
        """
        sequences = plan.seq_lens.shape[0]
        if sequences < 2 or plan.batch.max_seq_len is not None:
            return None
        shared = torch.empty(2, sequences, dtype=torch.int32)
        self._find_shared(
            plan.query_starts.data_ptr(),
            plan.seq_lens.data_ptr(),
            plan.block_tables.data_ptr(),
            plan.block_tables.shape[1],
            sequences,
            plan.batch.block_size,
            group,
            shared[0].data_ptr(),
            shared[1].data_ptr(),
        )
        return shared

    def describe(self) -> str:
        """Say which form this is."""
        return f"native (C++ over the pages, {torch.get_num_threads()} threads)"


def checked_plan(plan: AttentionPlan, kv_layer: Tensor) -> NativePlan:
    """Return this form's plan; raise `IndexError` where it goes beyond the cache's blocks."""
    if not isinstance(plan, NativePlan):
        raise TypeError(f"the plan was made by another attention form: {type(plan).__name__}")
    if kv_layer.shape[0] < plan.num_blocks:
        raise IndexError(
            f"the batch uses block {plan.num_blocks - 1}, the cache has {kv_layer.shape[0]} blocks"
        )
    return plan


def _dense_heads(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
