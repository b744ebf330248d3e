"""Plain torch twins of every kernel: the truth that tests compare with, written to be read."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inferq.kernels.attention import AttentionBatch, AttentionPlan, check_shapes
from inferq.kernels.gumbel import gumbel_noise


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32."""
    wide = x.float()
    variance = wide.pow(2).mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(variance + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Give the normalised sum of x and residual, and the sum as their type rounds it."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (i, i + rotary_dim / 2) of each head by the angle of the token's row.

    cos and sin are [T, rotary_dim / 2]; channels from rotary_dim on stay as they are.
    """
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    cosine, sine = cos.float()[:, None, :], sin.float()[:, None, :]  # [T, 1, rotary_dim / 2]
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat([part.to(x.dtype) for part in rotated] + [x[..., rotary_dim:]], dim=-1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) · up, where gate_up [T, 2 · I] holds gate, then up, in each row."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute gelu(gate) · up with gelu's tanh approximation, laid out as for silu_and_mul."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1.0 + torch.tanh(inner)) * up).to(gate_up.dtype)


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    child: Tensor,
    position: Tensor,
    vocab_size: int,
    sources: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sort each row, keep what the limits leave of the ranking, and draw from it."""
    logits = logits[:, :vocab_size] if sources is None else logits[sources, :vocab_size]
    highest, greedy = logits.max(dim=1)
    is_greedy = temperature <= 0
    scores = (logits - highest[:, None]) / torch.where(is_greedy, 1.0, temperature)[:, None]
    ranked, ids = scores.sort(dim=1, descending=True, stable=True)
    kept = ranked >= min_p.log()[:, None]
    kept &= (
        torch.arange(vocab_size, device=logits.device)
        < torch.where(top_k > 0, top_k, vocab_size)[:, None]
    )
    mass = (ranked.exp() * 2.0**40).long() * kept
    limit = (top_p.double() * mass.sum(dim=1).double()).ceil().long()
    kept &= (mass.cumsum(dim=1) - mass < limit[:, None]) | (top_p >= 1)[:, None]
    noisy = (ranked + gumbel_noise(seed, child, position, ids)).masked_fill(~kept, -torch.inf)
    # Equals: where there are limits the first of the ranking wins, else the lowest id.
    is_limited = (top_k > 0) | (top_p < 1)
    from_ranking = ids.gather(1, noisy.argmax(dim=1, keepdim=True))[:, 0]
    from_all = torch.empty_like(noisy).scatter_(1, ids, noisy).argmax(dim=1)
    drawn = torch.where(is_limited, from_ranking, from_all)
    return torch.where(is_greedy, greedy, drawn), highest


def awq_dequantize(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int, dtype: torch.dtype
) -> Tensor:
    """Give (q - zero) · scale [K, N] of AWQ's GEMM format, rounded once to dtype."""
    values, zeros = _unpack_awq(qweight), _unpack_awq(qzeros).repeat_interleave(group, dim=0)
    wide = scales.float().repeat_interleave(group, dim=0)
    return ((values - zeros).float() * wide).to(dtype)


def _unpack_awq(words: Tensor) -> Tensor:
    """Give the four-bit numbers [K, N] of int32 words [K, N / 8], in the order of the columns."""
    shifts = 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=words.device)
    return ((words[:, :, None] >> shifts) & 0xF).flatten(1)


def copy_blocks(blocks: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copy blocks [B, ...] from source to target, one move after the other."""
    for source, target in moves:
        blocks[target] = blocks[source]


class ReferenceAttention:
    """Paged attention one sequence and one query row at a time, in float32."""

    name = "reference"

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Keep the batch: nothing is derived."""
        return AttentionPlan(batch)

    def write_kv(self, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> None:
        """Store each token's key and value at its slot; slot -1 is skipped."""
        block_size = kv_layer.shape[2]
        for row, slot in enumerate(plan.batch.slot_mapping.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, block_size)
                kv_layer[block, 0, offset] = key[row]
                kv_layer[block, 1, offset] = value[row]

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
        """Attend causally over the cached tokens of each sequence."""
        check_shapes(query, kv_layer, plan.batch)
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        starts = plan.batch.query_starts.tolist()
        for index, seq_len in enumerate(plan.batch.seq_lens.tolist()):
            rows = range(starts[index], starts[index + 1])
            keys, values = _cached(kv_layer, plan.batch.block_tables[index], seq_len)
            for row in rows:
                position = seq_len - (rows.stop - row)
                if position < 0:
                    continue
                first = 0 if window is None else max(0, position + 1 - window)
                output[row] = _attend_row(
                    query[row],
                    keys[first : position + 1],
                    values[first : position + 1],
                    scale,
                    soft_cap,
                )
        return output

    def describe(self) -> str:
        """Say which form this is."""
        return "reference (plain torch, one row at a time)"


def _cached(kv_layer: Tensor, block_table: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Give the keys and values [seq_len, kv_heads, head_dim] of one sequence in float32."""
    block_size = kv_layer.shape[2]
    blocks = block_table[: -(-seq_len // block_size)].long()
    pages = kv_layer[blocks].float()  # [pages, 2, block_size, kv_heads, head_dim]
    keys, values = pages[:, 0].flatten(0, 1), pages[:, 1].flatten(0, 1)
    return keys[:seq_len], values[:seq_len]


def _attend_row(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, soft_cap: float | None
) -> Tensor:
    """Attend from one query row [heads, head_dim] to all given keys [L, kv_heads, head_dim]."""
    group = query.shape[0] // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)  # [L, heads, head_dim]
    values = values.repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,lhd->hl", query.float(), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return torch.einsum("hl,lhd->hd", torch.softmax(scores, dim=-1), values).to(query.dtype)
