"""Plain torch twins of every kernel: the truth that tests compare with, written to be read."""

import torch
from torch import Tensor

from inferq.kernels.attention import AttentionBatch, AttentionPlan, check_shapes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32."""
    wide = x.float()
    variance = wide.pow(2).mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(variance + eps) * weight.float()).to(x.dtype)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the pairs (i, i + head_dim / 2) of each head by the angle of the token's row."""
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cosine, sine = cos.float()[:, None, :], sin.float()[:, None, :]  # [T, 1, head_dim / 2]
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) · up, where gate_up [T, 2 · I] holds gate, then up, in each row."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


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
