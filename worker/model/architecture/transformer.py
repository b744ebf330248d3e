"""The decoder: token ids in, logits out, over a packed batch of ragged sequences.

All tokens of a step stand in one matrix [T, hidden_size], whatever sequence they belong to; only
attention knows the sequences, through the plan that it makes of the step's batch. Written for
Llama; where a family differs, `families.py` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, relu

from inferq.kernels.activation import gelu_and_mul, silu_and_mul
from inferq.kernels.attention import AttentionOps, AttentionPlan
from inferq.kernels.rotary import rotary
from inferq.worker.model.architecture.causal_model import ModelDescription, StepTensors
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.architecture.linear import Linear, LinearMethod, Reduction
from inferq.worker.model.architecture.lora import AdapterColumns, AdapterRows
from inferq.worker.model.architecture.norm import Norm
from inferq.worker.model.architecture.rope import RotaryTable
from inferq.worker.model.loading.loader import WeightGroup
from inferq.worker.model.ranks.parallel import Share
from inferq.worker.model.ranks.parallel_group import RankGroup, VocabularyPart

#: From the rows [T, 2 · inner] of gate and up, or [T, inner] of an MLP without a gate.
_GATED: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": silu_and_mul,
    "gelu_tanh": gelu_and_mul,
}
_PLAIN: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
    "relu": relu,
}


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass shares."""

    attention: AttentionOps
    plan: AttentionPlan
    kv_cache: Tensor
    #: Cosines and sines of the step's positions, for each of `ModelConfig.ropes`.
    angles: Sequence[tuple[Tensor, Tensor]]
    #: None where no row has an adapter.
    adapters: AdapterRows | None


class Attention:
    """Self-attention over the paged cache, with query, key and value in one projection."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        add_up: Reduction | None,
    ) -> None:
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.soft_cap = config.attention_soft_cap
        self.window, self.rope = config.layers[layer].window, config.layers[layer].rope
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.sizes = [query_size, kv_size, kv_size]
        names = config.family.names
        self.qkv = Linear(
            config.hidden_size,
            sum(self.sizes),
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
            quantized=config.quantized(layer, names.qkv),
        )
        self.output = Linear(
            query_size,
            config.hidden_size,
            bias=config.output_bias,
            dtype=dtype,
            device=device,
            quantized=config.quantized(layer, (names.attention_output,)),
            add_up=add_up,
        )
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        if names.query_norm is not None:
            self.query_norm = Norm(config, config.head_dim, dtype, device)
            self.key_norm = Norm(config, config.head_dim, dtype, device)

    def attend(self, hidden: Tensor, step: Step) -> Tensor:
        """Write this step's keys and values, and attend; returns [T, heads · head_dim]."""
        query, key, value = (
            part.view(part.shape[0], -1, self.head_dim)
            for part in torch.split(self.qkv(hidden, step.adapters), self.sizes, dim=1)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rope is not None:
            query, key = rotary(query, key, *step.angles[self.rope])
        kv_layer = step.kv_cache[:, self.layer]
        step.attention.write_kv(key, value, kv_layer, step.plan)
        attended = step.attention.attend(
            query,
            kv_layer,
            step.plan,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
        )
        return attended.flatten(1)


class MLP:
    """output(activation(gate(x)) · up(x)) or, without a gate, output(activation(input(x)))."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        add_up: Reduction | None,
    ) -> None:
        inner, hidden = config.intermediate_size, config.hidden_size
        names, gated = config.family.names, config.family.gated
        self.activation = (_GATED if gated else _PLAIN)[config.activation]
        self.sizes = [inner, inner] if gated else [inner]
        self.input = Linear(
            hidden,
            sum(self.sizes),
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            quantized=config.quantized(layer, names.mlp_input),
        )
        self.output = Linear(
            inner,
            hidden,
            bias=config.mlp_bias,
            dtype=dtype,
            device=device,
            quantized=config.quantized(layer, (names.mlp_output,)),
            add_up=add_up,
        )

    def __call__(self, hidden: Tensor, adapters: AdapterRows | None) -> Tensor:
        """Transform each row of [T, hidden_size]."""
        return self.output(self.activation(self.input(hidden, adapters)), adapters)


class DecoderLayer:
    """Attention, then MLP, each behind a norm that first adds the last result to the stream."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        add_up: Reduction | None,
    ) -> None:
        names, hidden = config.family.names, config.hidden_size
        self.names = names
        self.transposed = config.family.transposed
        self.input_norm = Norm(config, hidden, dtype, device)
        self.attention = Attention(config, layer, dtype, device, add_up)
        self.mlp_norm = Norm(config, hidden, dtype, device)
        self.mlp = MLP(config, layer, dtype, device, add_up)
        #: Gemma's norms of what is added to the stream.
        self.attention_post_norm: Norm | None = None
        self.mlp_post_norm: Norm | None = None
        if names.attention_post_norm is not None:
            self.attention_post_norm = Norm(config, hidden, dtype, device)
        if names.mlp_post_norm is not None:
            self.mlp_post_norm = Norm(config, hidden, dtype, device)

    def __call__(
        self, delta: Tensor, residual: Tensor | None, step: Step, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take and return what is to be added to the residual stream, and the stream.

        The first layer gets the embeddings and no stream. With `rows`, only those are returned
        (all keys are written).
        """
        if residual is None:
            normed, residual = self.input_norm(delta), delta
        else:
            normed, residual = self.input_norm.add(delta, residual)
        attended, adapters = self.attention.attend(normed, step), step.adapters
        if rows is not None:
            residual, attended = residual[rows], attended[rows]
            adapters = None if adapters is None else adapters.take(rows)
        attended = self.attention.output(attended, adapters)
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        normed, residual = self.mlp_norm.add(attended, residual)
        delta = self.mlp(normed, adapters)
        if self.mlp_post_norm is not None:
            delta = self.mlp_post_norm(delta)
        return delta, residual

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layer's matrix products."""
        return (self.attention.qkv, self.attention.output, self.mlp.input, self.mlp.output)

    @property
    def norms(self) -> Iterator[tuple[str | None, Norm | None]]:
        """The layer's norms, by their names in a checkpoint."""
        yield self.names.input_norm, self.input_norm
        yield self.names.query_norm, self.attention.query_norm
        yield self.names.key_norm, self.attention.key_norm
        yield self.names.attention_post_norm, self.attention_post_norm
        yield self.names.mlp_norm, self.mlp_norm
        yield self.names.mlp_post_norm, self.mlp_post_norm

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each of a layer's tensors and the (part of a) parameter that it fills."""
        for name, norm in self.norms:
            if name is not None and norm is not None:
                yield from norm.targets(name)
        attention, mlp = self.attention, self.mlp
        yield from self._parts(attention.qkv, self.names.qkv, attention.sizes)
        yield from self._parts(attention.output, (self.names.attention_output,))
        yield from self._parts(mlp.input, self.names.mlp_input, mlp.sizes)
        yield from self._parts(mlp.output, (self.names.mlp_output,))

    def _parts(
        self, linear: Linear, names: tuple[str, ...], sizes: Sequence[int] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's projections that stand one below the other in a fused one."""
        sizes = sizes if len(names) > 1 else [linear.outputs]
        if linear.stored is not None:
            for index, kind, target in linear.stored.targets(sizes):
                yield f"{names[index]}.{kind}", target
        else:
            for name, weight in zip(names, torch.split(linear.weight, list(sizes)), strict=True):
                yield f"{name}.weight", weight.T if self.transposed else weight
        if linear.bias is not None:
            for name, bias in zip(names, torch.split(linear.bias, list(sizes)), strict=True):
                yield f"{name}.bias", bias

    def pack(self, method: LinearMethod) -> None:
        """Fix the weights' form after loading."""
        for linear in self.linears:
            linear.pack(method)
        for _, norm in self.norms:
            if norm is not None:
                norm.pack()


class Decoder:
    """A decoder-only transformer whose parameters the loader fills through `targets`.

    `head_dtype` is that of head and embedding in memory; they are computed with in `dtype`. As one
    rank of a `group` it holds a share of the model: all ranks must make the same calls, and logits
    are whole on rank 0 only.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionOps,
        quantization: str | None = None,
        head_dtype: torch.dtype | None = None,
        group: RankGroup | None = None,
    ) -> None:
        self.config = config
        self.max_positions = max_positions
        self.device = device
        self._dtype, head_dtype = dtype, head_dtype or dtype
        self._method = LinearMethod(quantization, dtype)
        vocab_size, layer_config, add_up = config.vocab_size, config, None
        self._vocabulary: VocabularyPart | None = None
        if group is not None:
            share = Share(config, group.rank, group.size)
            vocab_size, layer_config, add_up = share.vocabulary_rows, share.config, group.add_up
            self._vocabulary = VocabularyPart.of(share, group)
        #: None once it is tied to a packed head whose rows can be read.
        self.embedding: Tensor | None = torch.empty(
            vocab_size, config.hidden_size, dtype=head_dtype, device=device
        )
        #: What embeddings are multiplied with, rounded to their dtype as it was in training.
        self._embedding_scale: float | None = None
        if config.family.scales_embeddings:
            self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype).item()
        #: The table of learned positions, with unused rows before that of position 0.
        self._positions: Tensor | None = None
        if config.family.position_offset is not None:
            rows = config.max_position_embeddings + config.family.position_offset
            self._positions = torch.empty(rows, config.hidden_size, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(layer_config, layer, dtype, device, add_up)
            for layer in range(config.num_layers)
        ]
        self.final_norm = Norm(config, config.hidden_size, dtype, device)
        self.head = Linear(
            config.hidden_size, vocab_size, bias=False, dtype=head_dtype, device=device
        )
        if config.tie_word_embeddings:
            self.head.weight = self.embedding
        self._rotary = [
            RotaryTable(rope, config.head_dim, max_positions, device) for rope in config.ropes
        ]
        self._attention = attention
        #: Set with the adapters of its products.
        self.adapters: AdapterColumns | None = None

    def hidden(self, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """Compute a step but for the head, writing the cache; return `rows` [R, hidden_size].

        The head then runs only for rows that are sampled, and so does the last layer's MLP.
        """
        return self.compute(*self.begin(step, kv_cache), step.rows)

    def begin(self, step: StepTensors, kv_cache: Tensor) -> tuple[Tensor, Step]:
        """Return what `compute` takes: embeddings [T, hidden_size], and what layers share."""
        angles = [table.rows(step.positions) for table in self._rotary]
        kept = None
        if step.adapters is not None and self.adapters is not None:
            kept = self.adapters.rows(step.adapters)
        plan = self._attention.plan(step.batch)
        shared = Step(self._attention, plan, kv_cache, angles, kept)
        return self._embed(step.token_ids, step.positions), shared

    def compute(self, embedded: Tensor, shared: Step, rows: Tensor | None = None) -> Tensor:
        """Run all layers on embeddings, which may be overwritten; return `rows`, or all of them."""
        delta = embedded
        residual: Tensor | None = None
        for layer in self.layers[:-1]:
            delta, residual = layer(delta, residual, shared)
        delta, residual = self.layers[-1](delta, residual, shared, rows)
        normed, _ = self.final_norm.add(delta, residual)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of hidden rows [R, hidden_size]."""
        logits = self.head(hidden)
        if (cap := self.config.logits_soft_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits if self._vocabulary is None else self._vocabulary.join(logits)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        if self._vocabulary is None:
            embedded = self._embedding_rows(token_ids)
        else:
            embedded = self._vocabulary.embed(token_ids, self._embedding_rows)
        if self._embedding_scale is not None:
            embedded *= self._embedding_scale
        if self._positions is not None:
            embedded += embedding(
                positions + (self.config.family.position_offset or 0), self._positions
            )
        return embedded

    def _embedding_rows(self, indices: Tensor) -> Tensor:
        if self.embedding is None:
            return self.head.rows(indices)
        return embedding(indices, self.embedding).to(self._dtype)

    @property
    def description(self) -> ModelDescription:
        """How it is computed, once it is packed."""
        linears = [*(linear for layer in self.layers for linear in layer.linears), self.head]
        tables = [t for t in (self.embedding, self._positions) if t is not None]
        stored = self.config.quantization
        return ModelDescription(
            path="native",
            quantization=self._method.quantization if stored is None else stored.describe(),
            weight_bytes=sum(x.nbytes for x in linears) + sum(x.nbytes for x in tables),
            dtype=self._dtype,
            attention=self._attention.describe(),
            products=tuple(dict.fromkeys(linear.form for linear in linears)),
        )

    def pack(self) -> None:
        """Fix the weights' layout after loading; see `Linear.pack`."""
        for group in self.weight_groups():
            group.finish()

    def targets(self) -> dict[str, Tensor]:
        """Map each checkpoint tensor's name to the (part of a) parameter that it fills."""
        return {
            name: target
            for group in self.weight_groups()
            for name, target in group.targets().items()
        }

    def weight_groups(self) -> list[WeightGroup]:
        """Return the targets in the order of loading: each group is packed before the next fills.

        The largest come first, while there is least beside them.
        """
        groups = [
            WeightGroup(self._embedding_targets, lambda: None),
            WeightGroup(self._head_targets, self._pack_head),
        ]
        groups += [
            WeightGroup(partial(self._layer_targets, index), partial(layer.pack, self._method))
            for index, layer in enumerate(self.layers)
        ]
        return groups

    def _embedding_targets(self) -> dict[str, Tensor]:
        names = self.config.family.names
        targets = {}
        if self.embedding is not None:
            targets[f"{names.model}{names.embedding}.weight"] = self.embedding
        if self._positions is not None:
            targets[f"{names.model}{names.positions}.weight"] = self._positions
        return targets

    def _head_targets(self) -> dict[str, Tensor]:
        names = self.config.family.names
        targets = dict(self.final_norm.targets(f"{names.model}{names.final_norm}"))
        if not self.config.tie_word_embeddings:
            targets[f"{names.head}.weight"] = self.head.weight
        return targets

    def _layer_targets(self, index: int) -> dict[str, Tensor]:
        names = self.config.family.names
        prefix = f"{names.model}{names.layer}{index}."
        return {f"{prefix}{name}": target for name, target in self.layers[index].targets()}

    def _pack_head(self) -> None:
        self.final_norm.pack()
        self.head.pack(self._method)
        if self.config.tie_word_embeddings and self.head.has_rows:
            self.embedding = None

    def rename(self, name: str) -> str | None:
        """Return the target of a checkpoint's tensor, or None for one that is not used.

        Exports of the bare model leave out the first part of their names.
        """
        if self.is_ignored(name):
            return None
        names = self.config.family.names
        base = names.model.partition(".")[0] + "."
        return name if name.startswith((base, f"{names.head}.")) else base + name

    def is_ignored(self, name: str) -> bool:
        """Whether a checkpoint may hold the tensor `name` although it is not used.

        That is a copy of tied embeddings, and what `TensorNames` lists.
        """
        names = self.config.family.names
        tied_head = self.config.tie_word_embeddings and name == f"{names.head}.weight"
        return (
            tied_head
            or name.endswith(names.ignored_ends + self.config.unused_biases)
            or name.startswith(names.ignored_prefixes)
        )
