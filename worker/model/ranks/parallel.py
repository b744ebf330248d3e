"""How a model is divided among ranks: what each of them holds (tensor parallelism).

Each rank has some of the attention heads with their keys and values, some of the MLP's inner rows,
and some of the vocabulary. What follows from it: the products behind them (attention output, MLP
output) are sums over the ranks, and so is an embedding, of which one rank has the row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch

from inferq.protocol.errors import ModelError
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.architecture.quantized_weight import LAYOUTS, TensorLayout

#: Rows of the vocabulary are given out by so many: matrix units want multiples of it.
_VOCABULARY_STEP: Final = 8


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank holds of a stored tensor: ranges of one dimension, one after the other.

    Where they are shorter than the rank's own tensor, the rest of that is padding: zeros.
    """

    dim: int
    #: Of the stored tensor.
    size: int
    ranges: tuple[tuple[int, int], ...]

    def stored_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the stored tensor, given that of the rank's own."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class Share:
    """The part of `model` that the rank `rank` of `size` holds; see `check_division`."""

    model: ModelConfig
    rank: int
    size: int

    @cached_property
    def config(self) -> ModelConfig:
        """The model's layers as this rank computes them; the vocabulary is still the whole one."""
        heads, kv_heads = self._heads, self._kv_heads
        inner_start, inner_stop = self._inner
        return replace(
            self.model,
            num_heads=heads[1] - heads[0],
            num_kv_heads=kv_heads[1] - kv_heads[0],
            intermediate_size=inner_stop - inner_start,
        )

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding and of the head, the same on all ranks: the last ones are padding.

        A rank's first row is `rank * vocabulary_rows`.
        """
        per_step = self.size * _VOCABULARY_STEP
        return -(-self.model.vocab_size // per_step) * _VOCABULARY_STEP

    def cut(self, name: str) -> Cut | None:
        """Return how the checkpoint's tensor `name` is divided; None: every rank has all of it."""
        names = self.model.family.names
        stem, _, kind = name.rpartition(".")
        if stem in {f"{names.model}{names.embedding}", names.head}:
            first, size = self.rank * self.vocabulary_rows, self.model.vocab_size
            stop = min(first + self.vocabulary_rows, size)
            return Cut(0, size, ((min(first, size), stop),))
        prefix = f"{names.model}{names.layer}"
        if not name.startswith(prefix):
            return None
        projection = stem.removeprefix(prefix).partition(".")[2]
        quantization = self.model.quantization
        if quantization is not None and kind in (layouts := LAYOUTS[quantization.method]):
            return self._quantized_cut(name, projection, layouts[kind], quantization.group_size)
        outputs_dim = int(self.model.family.transposed)
        if projection in self._by_outputs:
            size, ranges = self._by_outputs[projection]
            return Cut(0 if kind == "bias" else outputs_dim, size, ranges)
        if projection in self._by_inputs and kind != "bias":
            size, ranges = self._by_inputs[projection]
            return Cut(1 - outputs_dim, size, ranges)
        return None

    def _quantized_cut(
        self, name: str, projection: str, layout: TensorLayout, group_size: int
    ) -> Cut | None:
        """Return how a tensor [inputs, outputs], with several of them in one row or column, is cut.

        What belongs to all inputs of a projection is needed wherever some of them are.
        """
        if projection in self._by_outputs:
            return _packed_cut(name, 1, layout.outputs, *self._by_outputs[projection])
        if projection in self._by_inputs:
            per_row = layout.inputs or (None if group_size == -1 else group_size)
            return _packed_cut(name, 0, per_row, *self._by_inputs[projection])
        return None

    @cached_property
    def _by_outputs(self) -> dict[str, tuple[int, tuple[tuple[int, int], ...]]]:
        """The size and the ranges of the projections of which a rank computes some outputs."""
        model, names = self.model, self.model.family.names
        kv = (model.num_kv_heads * model.head_dim, self._scaled(self._kv_heads))
        parts = [(model.num_heads * model.head_dim, self._scaled(self._heads)), kv, kv]
        inner = [(model.intermediate_size, self._inner)] * (1 + model.family.gated)
        return {**_stacked(names.qkv, parts), **_stacked(names.mlp_input, inner)}

    @cached_property
    def _by_inputs(self) -> dict[str, tuple[int, tuple[tuple[int, int], ...]]]:
        """The same for projections of which a rank takes some inputs."""
        model, names = self.model, self.model.family.names
        attended = [(model.num_heads * model.head_dim, self._scaled(self._heads))]
        inner = [(model.intermediate_size, self._inner)]
        return {
            **_stacked((names.attention_output,), attended),
            **_stacked((names.mlp_output,), inner),
        }

    @property
    def _heads(self) -> tuple[int, int]:
        return self._part(self.model.num_heads)

    @property
    def _kv_heads(self) -> tuple[int, int]:
        if self.model.num_kv_heads >= self.size:
            return self._part(self.model.num_kv_heads)
        first = self.rank * self.model.num_kv_heads // self.size
        return first, first + 1

    @property
    def _inner(self) -> tuple[int, int]:
        return self._part(self.model.intermediate_size)

    def _part(self, count: int) -> tuple[int, int]:
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def _scaled(self, heads: tuple[int, int]) -> tuple[int, int]:
        return heads[0] * self.model.head_dim, heads[1] * self.model.head_dim


def _stacked(
    names: tuple[str, ...], parts: list[tuple[int, tuple[int, int]]]
) -> dict[str, tuple[int, tuple[tuple[int, int], ...]]]:
    """Give each name its size and range, or the only name those of all parts in one matrix."""
    if len(names) == len(parts):
        return {name: (size, (part,)) for name, (size, part) in zip(names, parts, strict=True)}
    [name] = names
    ranges, size = [], 0
    for part_size, (start, stop) in parts:
        ranges.append((size + start, size + stop))
        size += part_size
    return {name: (size, tuple(ranges))}


def _packed_cut(
    name: str, dim: int, packed: int | None, size: int, ranges: tuple[tuple[int, int], ...]
) -> Cut | None:
    """Cut a dimension that has one row or column for so many; None: it has none to cut."""
    if packed is None:
        return None
    for start, stop in ranges:
        if start % packed or stop % packed:
            raise ModelError(
                f"{name} holds {packed} in one, and cannot be cut from {start} to {stop}",
                field="tensor_parallel_size",
            )
    cuts = tuple((start // packed, stop // packed) for start, stop in ranges)
    return Cut(dim, size // packed, cuts)


def check_division(model: ModelConfig, size: int) -> None:
    """Raise `ModelError` with the numbers where `model` cannot be divided among `size` ranks."""
    for count, what in (
        (model.num_heads, "attention heads"),
        (model.intermediate_size, "inner rows of the MLP (intermediate_size)"),
    ):
        if count % size:
            raise _indivisible(model, f"{count} {what} cannot be divided among {size} ranks")
    kv_heads = model.num_kv_heads
    if kv_heads % size and size % kv_heads:
        raise _indivisible(
            model,
            f"{kv_heads} KV heads can neither be divided among {size} ranks, nor repeated evenly",
        )
    for layer in range(model.num_layers if model.quantization is not None else 0):
        try:
            _check_quantized(Share(model, 0, size), layer)
        except ModelError as error:
            raise ModelError(
                f"on each of {size} ranks, {error}", field="tensor_parallel_size"
            ) from None


def _check_quantized(share: Share, layer: int) -> None:
    """Raise `ModelError` where a share's part of a quantized projection is no whole of its own."""
    config, names = share.config, share.model.family.names
    attended, inner = config.num_heads * config.head_dim, config.intermediate_size
    kv = config.num_kv_heads * config.head_dim
    for modules, inputs, outputs in (
        (names.qkv, config.hidden_size, [attended, kv, kv]),
        ((names.attention_output,), attended, [config.hidden_size]),
        (names.mlp_input, config.hidden_size, [inner] * (1 + config.family.gated)),
        ((names.mlp_output,), inner, [config.hidden_size]),
    ):
        if (projection := config.quantized(layer, modules)) is not None:
            projection.group_size(inputs)
            whole = outputs if len(modules) == len(outputs) else [sum(outputs)]
            projection.check_outputs(whole)


def _indivisible(model: ModelConfig, reason: str) -> ModelError:
    possible = [
        size
        for size in range(1, model.num_heads + 1)
        if not model.num_heads % size
        and not model.intermediate_size % size
        and (not model.num_kv_heads % size or not size % model.num_kv_heads)
    ]
    return ModelError(
        f"{reason}; possible: {', '.join(map(str, possible))}", field="tensor_parallel_size"
    )


def check_devices(size: int, device: torch.device) -> None:
    """Raise `ModelError` where `size` ranks, one on each GPU, cannot run on `device`."""
    if size == 1 or device.type != "cuda":
        return
    if device.index:
        raise ModelError(
            f"{size} ranks take the GPUs from 0 on, but the device is {device}: choose others "
            "by CUDA_VISIBLE_DEVICES",
            field="tensor_parallel_size",
        )
    if (count := torch.cuda.device_count()) < size:
        raise ModelError(
            f"{size} ranks need {size} GPUs, one each, but there are {count}",
            field="tensor_parallel_size",
        )
