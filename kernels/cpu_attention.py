"""Paged attention on the CPU with torch alone: pages are gathered into a small reused buffer.

Decodes are sorted by length and attended in chunks, each with one gather and one batched SDPA;
prefills go one sequence at a time, in segments of query rows.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from inferq.kernels.attention import AttentionBatch, AttentionPlan, check_shapes

# Bytes of keys and values gathered at once. SmolLM2's shape (9 heads, 3 KV heads of 64, float32)
# at batch 64 and context 512, one layer, 2 Zen 4 cores, 2 threads: one sequence at a time 9.1 ms,
# 3 MB 5.7 ms, 6 MB 5.6 ms, 12 MB 7.1 ms, everything (50 MB) 11.1 ms: the gathered pages should
# still be in the cache when attention reads them.
_CHUNK_BYTES = 6 << 20

# A chunk takes no sequence with fewer pages than this share of its longest: bounds the padding.
_SHORTEST_SHARE = 0.75

# Query rows of a prefill that share one mask and key range. 512 new tokens: 3.4 ms with 256 rows,
# 4.4 ms with all rows (same machine and shape); it also bounds the mask's memory.
_SEGMENT_ROWS = 256


@dataclass(frozen=True, slots=True)
class _Gather:
    """Pages to copy next to each other, and which of the copied tokens nobody may see."""

    pages: Tensor  # int64 [P]
    hidden: Tensor  # int64: token rows among P * block_size that are set to zero

    def collect(self, kv_layer: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Give keys and values [P * block_size, kv_heads, head_dim] inside the buffer."""
        _, _, block_size, kv_heads, head_dim = kv_layer.shape
        tokens = self.pages.numel() * block_size
        size = tokens * kv_heads * head_dim
        both = []
        for part in range(2):
            flat = buffer[part * size : (part + 1) * size]
            pages = flat.view(-1, block_size, kv_heads, head_dim)
            torch.index_select(kv_layer[:, part], 0, self.pages, out=pages)
            rows = flat.view(tokens, kv_heads, head_dim)
            # A mask is not enough: a page's unused tail may hold NaN, and 0 * NaN is NaN.
            rows.index_fill_(0, self.hidden, 0.0)
            both.append(rows)
        return both[0], both[1]


@dataclass(frozen=True, slots=True)
class _DecodeChunk:
    """Decodes of similar length, padded to the same number of pages."""

    rows: Tensor | slice  # int64 [C]: query rows; a slice where they follow each other
    gather: _Gather
    mask: Tensor  # float32 [C, 1, 1, L]


@dataclass(frozen=True, slots=True)
class _Segment:
    """Query rows of one prefill and the cached tokens they look at."""

    rows: slice
    tokens: slice
    mask: Tensor | None  # float32 [rows, tokens]; None: plain causal


@dataclass(frozen=True, slots=True)
class _Prefill:
    gather: _Gather
    segments: tuple[_Segment, ...]


@dataclass(frozen=True, slots=True)
class _Work:
    """The step's gathers for one window."""

    decodes: tuple[_DecodeChunk, ...]
    prefills: tuple[_Prefill, ...]
    max_pages: int


@dataclass(frozen=True, slots=True)
class CpuPlan(AttentionPlan):
    """Cache addresses of the step's tokens; gathers are added at the first layer of each kind."""

    written: Tensor | None  # int64: rows to write; None: all
    blocks: Tensor  # int64, one for each written row
    offsets: Tensor
    work: dict[tuple[int | None, int], _Work] = field(default_factory=dict)
    """By window and tokens in a chunk: models mix layers with and without a window."""
    buffers: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict)


class CpuAttention:
    """The form for CPUs without a C++ compiler."""

    name = "torch"

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Split slots into blocks and offsets; leave out the rows that are not written."""
        slots = batch.slot_mapping
        written = None
        if slots.numel() and int(slots.min()) < 0:
            written = torch.nonzero(slots >= 0).flatten()
            slots = slots[written]
        return CpuPlan(
            batch=batch,
            written=written,
            blocks=slots // batch.block_size,
            offsets=slots % batch.block_size,
        )

    def write_kv(self, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> None:
        """Store each token's key and value at its slot; slot -1 is skipped."""
        own = _own(plan)
        if own.written is not None:
            key, value = key[own.written], value[own.written]
        kv_layer[own.blocks, 0, own.offsets] = key.to(kv_layer.dtype)
        kv_layer[own.blocks, 1, own.offsets] = value.to(kv_layer.dtype)

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
        own = _own(plan)
        work = _work(own, kv_layer, window)
        buffer = _buffer(own, kv_layer, work.max_pages)
        output = query.new_zeros(query.shape)
        for chunk in work.decodes:
            keys, values = chunk.gather.collect(kv_layer, buffer)
            output[chunk.rows] = _decode(query[chunk.rows], keys, values, chunk, scale, soft_cap)
        for prefill in work.prefills:
            keys, values = prefill.gather.collect(kv_layer, buffer)
            for segment in prefill.segments:
                output[segment.rows] = _prefill(query, keys, values, segment, scale, soft_cap)
        return output

    def describe(self) -> str:
        """Say which form this is."""
        return f"torch (SDPA over gathered pages, {torch.get_num_threads()} threads)"


def _own(plan: AttentionPlan) -> CpuPlan:
    if not isinstance(plan, CpuPlan):
        raise TypeError(f"the plan was made by another attention form: {type(plan).__name__}")
    return plan


def _work(plan: CpuPlan, kv_layer: Tensor, window: int | None) -> _Work:
    token_bytes = 2 * kv_layer.shape[3] * kv_layer.shape[4] * kv_layer.element_size()
    chunk_tokens = _CHUNK_BYTES // token_bytes
    work = plan.work.get((window, chunk_tokens))
    if work is None:
        work = _plan_work(plan.batch, window, chunk_tokens)
        plan.work[window, chunk_tokens] = work
    return work


def _buffer(plan: CpuPlan, kv_layer: Tensor, max_pages: int) -> Tensor:
    """Give the step's gather buffer: fresh memory for each layer would cost page faults."""
    size = max_pages * 2 * kv_layer[0, 0].numel()
    buffer = plan.buffers.get((kv_layer.dtype, size))
    if buffer is None:
        buffer = kv_layer.new_empty(size)
        plan.buffers[kv_layer.dtype, size] = buffer
    return buffer


def _plan_work(batch: AttentionBatch, window: int | None, chunk_tokens: int) -> _Work:
    starts = _row_starts(batch)
    lens = batch.total_lens
    decodes = [index for index in range(batch.num_decodes) if lens[index] > 0]
    spans = {index: _page_span(lens[index], 1, window, batch.block_size) for index in decodes}
    chunks = tuple(
        _decode_chunk(batch, members, [lens[member] for member in members], spans, window)
        for members in _chunk_members(spans, max(1, chunk_tokens // batch.block_size))
    )
    prefills = tuple(
        _prefill_work(batch, index, lens[index], starts[index], window)
        for index in range(batch.num_decodes, len(lens))
        if lens[index] > 0 and batch.query_lens[index] > 0
    )
    gathers = [chunk.gather for chunk in chunks] + [prefill.gather for prefill in prefills]
    return _Work(chunks, prefills, max((g.pages.numel() for g in gathers), default=0))


def _row_starts(batch: AttentionBatch) -> list[int]:
    starts = [0]
    for length in batch.query_lens:
        starts.append(starts[-1] + length)
    return starts


def _page_span(seq_len: int, query_len: int, window: int | None, block_size: int) -> range:
    """Give the pages that the last query_len tokens look at."""
    first = 0 if window is None else max(0, seq_len - query_len + 1 - window)
    return range(first // block_size, -(-seq_len // block_size))


def _chunk_members(spans: dict[int, range], chunk_pages: int) -> list[list[int]]:
    """Group decodes, longest first, so that little is padded and a chunk stays small."""
    chunks: list[list[int]] = []
    for index in sorted(spans, key=lambda index: -len(spans[index])):
        pages = len(spans[index])
        longest = len(spans[chunks[-1][0]]) if chunks else 0
        fits = chunks and longest * (len(chunks[-1]) + 1) <= chunk_pages
        if fits and pages >= _SHORTEST_SHARE * longest:
            chunks[-1].append(index)
        else:
            chunks.append([index])
    return chunks


def _decode_chunk(
    batch: AttentionBatch,
    members: list[int],
    seq_lens: list[int],
    spans: dict[int, range],
    window: int | None,
) -> _DecodeChunk:
    pages = len(spans[members[0]])
    index = torch.tensor(members)
    lens = torch.tensor(seq_lens)[:, None]
    first_pages = torch.tensor([spans[member].start for member in members])[:, None]
    columns = first_pages + torch.arange(pages)  # [C, pages]
    columns.clamp_(max=batch.block_tables.shape[1] - 1)
    tables = batch.block_tables[index].gather(1, columns).long()
    positions = first_pages * batch.block_size + torch.arange(pages * batch.block_size)
    visible = positions < lens
    if window is not None:
        visible &= positions >= lens - window
    return _DecodeChunk(
        rows=_as_rows(members),
        gather=_Gather(tables.flatten(), torch.nonzero(~visible.flatten()).flatten()),
        mask=_additive(visible)[:, None, None, :],
    )


def _as_rows(members: list[int]) -> Tensor | slice:
    first, count = members[0], len(members)
    if members == list(range(first, first + count)):
        return slice(first, first + count)
    return torch.tensor(members)


def _prefill_work(
    batch: AttentionBatch, index: int, seq_len: int, row: int, window: int | None
) -> _Prefill:
    query_len = batch.query_lens[index]
    span = _page_span(seq_len, query_len, window, batch.block_size)
    base = span.start * batch.block_size
    first = seq_len - query_len  # the position of the first query row
    pages = batch.block_tables[index, span.start : span.stop].long()
    hidden = torch.arange(seq_len - base, len(span) * batch.block_size)
    if window is not None and first + 1 - window > base:
        hidden = torch.cat([torch.arange(first + 1 - window - base), hidden])
    segments = tuple(
        _segment(row - first, base, range(start, min(start + _SEGMENT_ROWS, seq_len)), window)
        for start in range(first, seq_len, _SEGMENT_ROWS)
    )
    return _Prefill(_Gather(pages, hidden), segments)


def _segment(shift: int, base: int, positions: range, window: int | None) -> _Segment:
    """Plan the query rows at these positions; row = position + shift, token = position - base."""
    oldest = 0 if window is None else max(0, positions.start + 1 - window)
    keys = range(oldest, positions.stop)
    mask = None
    if len(keys) != len(positions) or (window is not None and window < len(keys)):
        query_positions = torch.tensor(positions)[:, None]
        key_positions = torch.tensor(keys)
        visible = key_positions <= query_positions
        if window is not None:
            visible &= key_positions > query_positions - window
        mask = _additive(visible)
    return _Segment(
        rows=slice(positions.start + shift, positions.stop + shift),
        tokens=slice(keys.start - base, keys.stop - base),
        mask=mask,
    )


def _additive(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


def _decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chunk: _DecodeChunk,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """Attend from [C, heads, head_dim]; the heads of one KV head stand as its query rows."""
    count, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.reshape(count, kv_heads, heads // kv_heads, head_dim)
    keys = keys.view(count, -1, kv_heads, head_dim).transpose(1, 2)  # [C, kv_heads, L, head_dim]
    values = values.view(count, -1, kv_heads, head_dim).transpose(1, 2)
    result = _sdpa(grouped, keys, values, chunk.mask, scale, soft_cap)
    return result.reshape(count, heads, head_dim)


def _prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    segment: _Segment,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """Attend from the segment's rows of [T, heads, head_dim]."""
    heads = query[segment.rows].transpose(0, 1)[None]  # [1, heads, rows, head_dim]
    keys = keys[segment.tokens].transpose(0, 1)[None]
    values = values[segment.tokens].transpose(0, 1)[None]
    return _sdpa(heads, keys, values, segment.mask, scale, soft_cap)[0].transpose(0, 1)


def _sdpa(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    """Attend [B, heads, rows, head_dim] to [B, kv_heads, L, head_dim]; mask None: causal."""
    if soft_cap is not None:
        return _soft_capped(query, keys, values, mask, scale, soft_cap)
    # torch's float16 attention is slow on CPUs: 3.0 ms for 8 decodes at context 512 (9 heads, one
    # thread), 0.6 ms when widened.
    dtype = torch.float32 if query.dtype == torch.float16 else query.dtype
    result = functional.scaled_dot_product_attention(
        query.to(dtype),
        keys.to(dtype),
        values.to(dtype),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return result.to(query.dtype)


def _soft_capped(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    soft_cap: float,
) -> Tensor:
    """Attend with capped scores in float32: torch's fused attention has no soft cap."""
    rows, tokens = query.shape[2], keys.shape[2]
    if mask is None:
        mask = _additive(torch.ones(rows, tokens, dtype=torch.bool).tril_())
    group = query.shape[1] // keys.shape[1]
    wide_keys = keys.float().repeat_interleave(group, dim=1)
    wide_values = values.float().repeat_interleave(group, dim=1)
    scores = torch.matmul(query.float() * scale, wide_keys.transpose(-1, -2))
    scores = scores.div_(soft_cap).tanh_().mul_(soft_cap).add_(mask)
    return torch.matmul(torch.softmax(scores, dim=-1), wide_values).to(query.dtype)
