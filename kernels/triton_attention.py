"""Paged attention on GPUs: the Triton kernels joined to one form."""

from dataclasses import dataclass, field

import numpy as np
import torch
import triton
from torch import Tensor

from inferq.kernels.attention import HEAD_DIMS, AttentionBatch, AttentionPlan, check_shapes
from inferq.kernels.triton_decode import DecodeTile, decode_attention, decode_tile
from inferq.kernels.triton_kv_write import kv_write
from inferq.kernels.triton_pages import architecture
from inferq.kernels.triton_prefill import (
    PrefillTile,
    prefill_attention,
    prefill_tile,
    tile_tokens,
)
from inferq.kernels.triton_schedule import (
    DecodeWork,
    SplitPolicy,
    count_items,
    schedule_decodes,
    splits_any,
)


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a tuner sweeps; None: the tables' choice for the device."""

    decode: DecodeTile | None = None
    prefill: PrefillTile | None = None
    splits: SplitPolicy = field(default_factory=SplitPolicy)
    processors: int | None = None
    """Multiprocessors to fill; None: the device's."""


@dataclass(frozen=True, slots=True)
class TritonPlan(AttentionPlan):
    """The step's batch; work items and tiles are added at the first layer of each kind."""

    captured: bool
    """Whether the plan belongs to a graph that is being captured."""
    work: dict[tuple[int, int, int, int | None], DecodeWork | None] = field(default_factory=dict)
    """By query heads, KV heads, head size and window; None: no sequence is split."""
    tiles: dict[int, Tensor] = field(default_factory=dict)
    """By query tokens in a tile."""


class TritonAttention:
    """The form for CUDA devices; on the CPU it needs Triton's interpreter."""

    name = "triton"

    def __init__(self, device: torch.device, tuning: Tuning | None = None) -> None:
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ValueError(f"attention form 'triton' cannot run on {device}")
        self._tuning = tuning or Tuning()
        self._architecture = architecture(device)
        self._processors = self._tuning.processors or _processors(device)
        self._programs = self._processors * self._tuning.splits.programs_per_processor

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Keep the batch: the rest follows when the cache's shape is known."""
        return TritonPlan(batch, captured=_capturing(batch.seq_lens.device))

    def write_kv(self, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> None:
        """Store each token's key and value at its slot; slot -1 is skipped."""
        kv_write(key, value, kv_layer, plan.batch.slot_mapping)

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
        own = _own(plan)
        batch = own.batch
        _check(query, kv_layer, batch)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        head_dim, element_size = query.shape[2], kv_layer.element_size()
        if batch.num_decodes:
            decode_attention(
                query[: batch.num_decodes],
                kv_layer,
                batch.block_tables,
                batch.seq_lens[: batch.num_decodes],
                out,
                self._work(own, query, kv_layer, window),
                tile=self._tuning.decode or decode_tile(head_dim, element_size, self._architecture),
                scale=scale,
                window=window,
                soft_cap=soft_cap,
            )
        if batch.num_decodes < len(batch.query_lens):
            tile = self._tuning.prefill or prefill_tile(head_dim, element_size, self._architecture)
            prefill_attention(
                query,
                kv_layer,
                batch.block_tables,
                batch.seq_lens,
                batch.query_starts,
                out,
                _tiles(own, tile_tokens(tile, query.shape[1] // kv_layer.shape[3])),
                tile=tile,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
            )
        return out

    def describe(self) -> str:
        """Say which form this is."""
        return (
            f"triton (version {triton.__version__}, {self._processors} multiprocessors, "
            f"tiles for sm_{self._architecture})"
        )

    def _work(
        self, plan: TritonPlan, query: Tensor, kv_layer: Tensor, window: int | None
    ) -> DecodeWork | None:
        heads, kv_heads, head_dim = query.shape[1], kv_layer.shape[3], query.shape[2]
        key = (heads, kv_heads, head_dim, window)
        if key not in plan.work:
            items = self._items(plan.batch, kv_heads, window)
            plan.work[key] = None
            if items > plan.batch.num_decodes:
                plan.work[key] = schedule_decodes(
                    plan.batch.seq_lens[: plan.batch.num_decodes],
                    items,
                    (heads, kv_heads),
                    head_dim,
                    window=window,
                    programs=self._programs,
                    policy=self._tuning.splits,
                )
        return plan.work[key]

    def _items(self, batch: AttentionBatch, kv_heads: int, window: int | None) -> int:
        """Give the decodes' work items; as many as there are decodes where none is split."""
        policy = self._tuning.splits
        rows = batch.num_decodes
        if batch.max_seq_len is not None:
            longest = batch.max_seq_len
        else:
            lens = batch.total_lens[:rows]
            longest = max(lens)
            seen = lens if window is None else tuple(min(length, window) for length in lens)
            if not splits_any(seen, kv_heads, self._programs, policy):
                return rows
        return count_items(rows, kv_heads, longest, window, self._programs, policy)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _own(plan: AttentionPlan) -> TritonPlan:
    if not isinstance(plan, TritonPlan):
        raise TypeError(f"the plan was made by another attention form: {type(plan).__name__}")
    # Work items computed outside of the capture would not be computed again at a replay.
    if plan.captured != _capturing(plan.batch.seq_lens.device):
        raise RuntimeError("a plan must be made and used inside the same CUDA graph capture")
    return plan


def _check(query: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> None:
    check_shapes(query, kv_layer, batch)
    if query.shape[2] not in HEAD_DIMS:
        raise ValueError(f"head_dim {query.shape[2]} is not supported: choose from {HEAD_DIMS}")
    if query.stride(-1) != 1 or kv_layer.stride(-1) != 1:
        raise ValueError("query and cache need contiguous heads (last stride 1)")


def _tiles(plan: TritonPlan, tokens: int) -> Tensor:
    tiles = plan.tiles.get(tokens)
    if tiles is None:
        tiles = _on_device(prefill_tiles(plan.batch, tokens), plan.batch.seq_lens.device)
        plan.tiles[tokens] = tiles
    return tiles


def prefill_tiles(batch: AttentionBatch, tokens: int) -> Tensor:
    """Cut the queries of all but the decodes into tiles: int32 [count, 2] on the host.

    Each is a sequence and a first query token. The ones that see most come first, so that the
    last to start soon end.
    """
    lens = np.array(batch.query_lens[batch.num_decodes :], dtype=np.int64)
    contexts = np.array(batch.context_lens[batch.num_decodes :], dtype=np.int64)
    counts = -(-lens // tokens)
    ends = counts.cumsum()
    owners = np.arange(len(lens)).repeat(counts)
    offsets = (np.arange(len(owners)) - (ends - counts)[owners]) * tokens
    order = np.argsort(-(contexts[owners] + offsets), kind="stable")
    table = np.stack((owners[order] + batch.num_decodes, offsets[order]), axis=1)
    return torch.from_numpy(table.astype(np.int32))


def _on_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting for the device: that needs pinned memory, which torch reuses."""
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)
