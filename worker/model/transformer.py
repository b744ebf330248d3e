"""The decoder: token ids in, logits out, over a packed batch of ragged sequences.

All tokens of a step stand in one matrix [T, hidden_size], whatever sequence they belong to; only
attention knows the sequences, through the plan that it makes of the step's batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from inferq.kernels.activation import silu_and_mul
from inferq.kernels.attention import AttentionBatch, AttentionOps, AttentionPlan
from inferq.kernels.norm import add_rms_norm, rms_norm
from inferq.kernels.rotary import rotary
from inferq.worker.model.config import ModelConfig
from inferq.worker.model.linear import Linear
from inferq.worker.model.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass shares."""

    attention: AttentionOps
    plan: AttentionPlan
    kv_cache: Tensor
    cos: Tensor
    sin: Tensor


class Attention:
    """Self-attention over the paged cache, with query, key and value in one projection."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.window = config.sliding_window
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.sizes = [query_size, kv_size, kv_size]
        self.qkv = Linear(
            config.hidden_size,
            sum(self.sizes),
            bias=config.attention_bias,
            dtype=dtype,
            device=device,
        )
        self.output = Linear(
            query_size,
            config.hidden_size,
            bias=config.attention_bias,
            dtype=dtype,
            device=device,
        )

    def attend(self, hidden: Tensor, step: Step) -> Tensor:
        """Write this step's keys and values, and attend; returns [T, heads · head_dim]."""
        query, key, value = (
            part.view(part.shape[0], -1, self.head_dim)
            for part in torch.split(self.qkv(hidden), self.sizes, dim=1)
        )
        query, key = rotary(query, key, step.cos, step.sin)
        kv_layer = step.kv_cache[:, self.layer]
        step.attention.write_kv(key, value, kv_layer, step.plan)
        attended = step.attention.attend(
            query, kv_layer, step.plan, scale=self.scale, window=self.window
        )
        return attended.flatten(1)


class MLP:
    """down(silu(gate(x)) · up(x)), with gate and up in one projection."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        inner, hidden = config.intermediate_size, config.hidden_size
        self.gate_up = Linear(hidden, 2 * inner, bias=config.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(inner, hidden, bias=config.mlp_bias, dtype=dtype, device=device)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Transform each row of [T, hidden_size]."""
        return self.down(silu_and_mul(self.gate_up(hidden)))


class DecoderLayer:
    """Attention, then MLP, each behind a norm that first adds the last result to the stream."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.eps = config.rms_norm_eps
        self.input_norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.attention = Attention(config, layer, dtype, device)
        self.mlp_norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype, device)

    def __call__(
        self, delta: Tensor, residual: Tensor | None, step: Step, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take and return what is to be added to the residual stream, and the stream.

        The first layer gets the embeddings and no stream. With `rows`, only those are returned
        (all keys are written).
        """
        if residual is None:
            normed, residual = rms_norm(delta, self.input_norm, self.eps), delta
        else:
            normed, residual = add_rms_norm(delta, residual, self.input_norm, self.eps)
        attended = self.attention.attend(normed, step)
        if rows is not None:
            residual, attended = residual[rows], attended[rows]
        attended = self.attention.output(attended)
        normed, residual = add_rms_norm(attended, residual, self.mlp_norm, self.eps)
        return self.mlp(normed), residual

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layer's matrix products."""
        return (self.attention.qkv, self.attention.output, self.mlp.gate_up, self.mlp.down)


class Decoder:
    """A decoder-only transformer whose parameters the loader fills through `targets`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionOps,
    ) -> None:
        self.config = config
        self.max_positions = max_positions
        self.embedding = torch.empty(
            config.vocab_size, config.hidden_size, dtype=dtype, device=device
        )
        self.layers = [
            DecoderLayer(config, layer, dtype, device) for layer in range(config.num_layers)
        ]
        self.final_norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self.head = Linear(
            config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device
        )
        if config.tie_word_embeddings:
            self.head.weight = self.embedding
        self._rotary = RotaryTable(config.rope, config.head_dim, max_positions, device)
        self._attention = attention

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv_cache: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """Compute token_ids [T] at positions [T], write their KV; return logits of `rows` [R].

        The result is [R, vocab_size]: the head runs only for rows that are sampled.
        """
        return self.logits(self.hidden(token_ids, positions, batch, kv_cache, rows))

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv_cache: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """Compute like `forward`, but stop before the head: returns `rows` [R, hidden_size]."""
        cos, sin = self._rotary.rows(positions)
        step = Step(self._attention, self._attention.plan(batch), kv_cache, cos, sin)
        delta = embedding(token_ids, self.embedding)
        residual: Tensor | None = None
        for layer in self.layers[:-1]:
            delta, residual = layer(delta, residual, step)
        delta, residual = self.layers[-1](delta, residual, step, rows)
        normed, _ = add_rms_norm(delta, residual, self.final_norm, self.config.rms_norm_eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of hidden rows [R, hidden_size]."""
        return self.head(hidden)

    def pack(self) -> None:
        """Fix the weights' layout after loading; see `Linear.pack`."""
        for layer in self.layers:
            for linear in layer.linears:
                linear.pack()
        self.head.pack()

    def targets(self) -> dict[str, Tensor]:
        """Map each checkpoint tensor's name to the (part of a) parameter that it fills."""
        targets = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.final_norm,
        }
        if not self.config.tie_word_embeddings:
            targets["lm_head.weight"] = self.head.weight
        for index, layer in enumerate(self.layers):
            for name, target in _layer_targets(layer):
                targets[f"model.layers.{index}.{name}"] = target
        return targets

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint may hold the tensor `name` although it is not used.

        That is a copy of tied embeddings, and the rotary frequencies of old exports.
        """
        tied_head = self.config.tie_word_embeddings and name == "lm_head.weight"
        return tied_head or name.endswith("rotary_emb.inv_freq")


def _layer_targets(layer: DecoderLayer) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.mlp_norm
    attention, mlp = layer.attention, layer.mlp
    inner = mlp.gate_up.weight.shape[0] // 2
    yield from _parts(attention.qkv, "self_attn", ("q_proj", "k_proj", "v_proj"), attention.sizes)
    yield from _parts(attention.output, "self_attn", ("o_proj",))
    yield from _parts(mlp.gate_up, "mlp", ("gate_proj", "up_proj"), [inner, inner])
    yield from _parts(mlp.down, "mlp", ("down_proj",))


def _parts(
    linear: Linear, owner: str, names: tuple[str, ...], sizes: list[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint's projections that stand one below the other in a fused one."""
    sizes = sizes or [linear.weight.shape[0]]
    for name, weight in zip(names, torch.split(linear.weight, sizes), strict=True):
        yield f"{owner}.{name}.weight", weight
    if linear.bias is not None:
        for name, bias in zip(names, torch.split(linear.bias, sizes), strict=True):
            yield f"{owner}.{name}.bias", bias
