"""Paged attention on GPUs: the Triton kernels joined to one form."""

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from inferq.kernels.attention import HEAD_DIMS, AttentionBatch, AttentionPlan, check_shapes
from inferq.kernels.triton_decode import DecodeSplits, decode_attention
from inferq.kernels.triton_kv_write import kv_write
from inferq.kernels.triton_prefill import PrefillTiles, prefill_attention, tile_rows

# Programs wanted for each multiprocessor, and the fewest tokens worth a split. Not measured yet.
_PROGRAMS_PER_PROCESSOR = 2
_MIN_SPLIT_TOKENS = 256
_MAX_SPLITS = 128


@dataclass(frozen=True, slots=True)
class TritonPlan(AttentionPlan):
    """The step's batch; splits and tiles are added at the first layer of each kind."""

    splits: dict[tuple[int, int | None], DecodeSplits] = field(default_factory=dict)
    """By KV heads and window."""
    tiles: dict[int, PrefillTiles] = field(default_factory=dict)
    """By query rows in a tile."""


class TritonAttention:
    """The form for CUDA devices; on the CPU it needs Triton's interpreter."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ValueError(f"attention form 'triton' cannot run on {device}")
        self._processors = 1
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Keep the batch: splits and tiles follow when the cache's shape is known."""
        return TritonPlan(batch)

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
        _check(query, kv_layer, plan.batch)
        own = _own(plan)
        batch = own.batch
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if batch.num_decodes:
            decode_attention(
                query[: batch.num_decodes],
                kv_layer,
                batch.block_tables,
                batch.seq_lens,
                out,
                self._splits(own, kv_layer.shape[3], window),
                scale=scale,
                window=window,
                soft_cap=soft_cap,
            )
        tiles = _tiles(own, tile_rows(query.shape[2], kv_layer.element_size()))
        if tiles.sequences.numel():
            prefill_attention(
                query,
                kv_layer,
                batch.block_tables,
                batch.seq_lens,
                batch.query_starts,
                out,
                tiles,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
            )
        return out

    def describe(self) -> str:
        """Say which form this is."""
        return f"triton (version {triton.__version__}, {self._processors} multiprocessors)"

    def _splits(self, plan: TritonPlan, kv_heads: int, window: int | None) -> DecodeSplits:
        splits = plan.splits.get((kv_heads, window))
        if splits is None:
            lens = plan.batch.total_lens[: plan.batch.num_decodes]
            seen = [length if window is None else min(length, window) for length in lens]
            splits = decode_splits(seen, kv_heads, self._processors * _PROGRAMS_PER_PROCESSOR)
            plan.splits[kv_heads, window] = splits
        return splits


def decode_splits(lens: list[int], kv_heads: int, programs: int) -> DecodeSplits:
    """Choose one length for all splits, so that long sequences get more of them.

    Splits are as long as they may be with about `programs` of them on the device together.
    """
    longest = max(lens)
    even = -(-sum(lens) * kv_heads // programs)
    tokens = max(even, _MIN_SPLIT_TOKENS, -(-longest // _MAX_SPLITS))
    tokens = -(-tokens // _MIN_SPLIT_TOKENS) * _MIN_SPLIT_TOKENS
    return DecodeSplits(tokens=tokens, most=max(1, -(-longest // tokens)))


def _own(plan: AttentionPlan) -> TritonPlan:
    if not isinstance(plan, TritonPlan):
        raise TypeError(f"the plan was made by another attention form: {type(plan).__name__}")
    return plan


def _check(query: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> None:
    check_shapes(query, kv_layer, batch)
    if query.shape[2] not in HEAD_DIMS:
        raise ValueError(f"head_dim {query.shape[2]} is not supported: choose from {HEAD_DIMS}")
    if query.stride(-1) != 1 or kv_layer.stride(-1) != 1:
        raise ValueError("query and cache need contiguous heads (last stride 1)")


def _tiles(plan: TritonPlan, rows: int) -> PrefillTiles:
    tiles = plan.tiles.get(rows)
    if tiles is None:
        batch = plan.batch
        found = [
            (batch.context_lens[index] + offset, index, offset)
            for index in range(batch.num_decodes, len(batch.query_lens))
            for offset in range(0, batch.query_lens[index], rows)
        ]
        found.sort(reverse=True)  # the longest first: the last ones to start end soon
        table = torch.tensor([tile[1:] for tile in found], dtype=torch.int32).reshape(-1, 2)
        table = table.t().contiguous().to(batch.seq_lens.device)
        tiles = PrefillTiles(sequences=table[0], offsets=table[1])
        plan.tiles[rows] = tiles
    return tiles
