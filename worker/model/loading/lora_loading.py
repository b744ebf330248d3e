"""Puts adapters beside the matrix products of a loaded decoder."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inferq.kernels.huge_pages import HugePages
from inferq.worker.model.architecture.linear import Linear
from inferq.worker.model.architecture.lora import AdapterColumns, LoraProduct
from inferq.worker.model.architecture.transformer import Decoder
from inferq.worker.model.loading.lora_files import Adapter, read_adapter
from inferq.worker.model.ranks.parallel import Share
from inferq.worker.model.sizing.memory import format_bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Product:
    """One matrix product of a layer, and the projections of the checkpoint that it joins.

    Sizes are those of the whole model, `held_` what this rank has of them.
    """

    linear: Linear
    modules: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]
    held_inputs: int
    held_outputs: tuple[int, ...]


def load_adapters(
    decoder: Decoder,
    folders: Mapping[str, str | Path],
    *,
    max_rank: int,
    dtype: torch.dtype,
    share: Share | None = None,
) -> None:
    """Read the adapters, and number them from 1 on in the order of `folders`.

    Of a decoder that holds a `share` of its model, they get the same share. Raises `ModelError` for
    one that does not fit the decoder or is not supported.
    """
    products = list(_products(decoder))
    modules = {
        module: (product.inputs, size)
        for product in products
        for module, size in zip(product.modules, product.outputs, strict=True)
    }
    adapters = [
        read_adapter(name, Path(folder), modules, max_rank=max_rank)
        for name, folder in folders.items()
    ]
    for adapter in adapters:
        _log.info(
            "adapter %s: rank %d on %d projections, %s, from %s",
            adapter.name,
            adapter.rank,
            len(adapter.weights),
            format_bytes(adapter.nbytes),
            folders[adapter.name],
        )
    columns = AdapterColumns([adapter.rank for adapter in adapters], decoder.device)
    decoder.adapters, device, memory = columns, decoder.device, HugePages()
    with torch.inference_mode():
        for product in products:
            parts = list(_parts(product, adapters, share))
            if parts:
                product.linear.lora = LoraProduct(
                    torch.cat([down for _, down, _ in parts]).to(device, dtype),
                    [(first, up.to(device, dtype)) for first, _, up in parts],
                    outputs=sum(product.held_outputs),
                    columns=columns,
                    memory=memory,
                )


def _parts(
    product: _Product, adapters: Sequence[Adapter], share: Share | None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the first output, A and scaled B of all adapters, for each projection they change."""
    ranks, first = sum(adapter.rank for adapter in adapters), 0
    for module, size in zip(product.modules, product.held_outputs, strict=True):
        if any(module in adapter.weights for adapter in adapters):
            down = torch.zeros(ranks, product.held_inputs)
            up = torch.zeros(size, ranks)
            _fill(down, up, module, adapters, share)
            yield first, down, up
        first += size


def _fill(
    down: Tensor, up: Tensor, module: str, adapters: Sequence[Adapter], share: Share | None
) -> None:
    start = 0
    for adapter in adapters:
        columns = slice(start, start + adapter.rank)
        if module in adapter.weights:
            a, b = _held(adapter.weights[module], module, share)
            down[columns] = a
            up[:, columns] = b.float() * adapter.scaling
        start = columns.stop


def _held(
    weights: tuple[Tensor, Tensor], module: str, share: Share | None
) -> tuple[Tensor, Tensor]:
    """Return the inputs of A and the outputs of B that a share of the model has."""
    a, b = weights
    cut = None if share is None else share.cut(f"{module}.weight")
    if share is None or cut is None:
        return a, b
    if cut.dim == int(share.model.family.transposed):
        return a, torch.cat([b[start:stop] for start, stop in cut.ranges])
    return torch.cat([a[:, start:stop] for start, stop in cut.ranges], dim=1), b


def _products(decoder: Decoder) -> Iterator[_Product]:
    config, names = decoder.config, decoder.config.family.names
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for index, layer in enumerate(decoder.layers):
        attention, mlp = layer.attention, layer.mlp
        inners = [inner] * len(mlp.sizes)
        prefix = f"{names.model}{names.layer}{index}."
        for linear, stems, whole, held in (
            (attention.qkv, names.qkv, (hidden, [query, kv, kv]), (hidden, attention.sizes)),
            (
                attention.output,
                (names.attention_output,),
                (query, [hidden]),
                (attention.sizes[0], [hidden]),
            ),
            (mlp.input, names.mlp_input, (hidden, inners), (hidden, mlp.sizes)),
            (mlp.output, (names.mlp_output,), (inner, [hidden]), (mlp.sizes[0], [hidden])),
        ):
            yield _Product(
                linear=linear,
                modules=tuple(prefix + stem for stem in stems),
                inputs=whole[0],
                outputs=_joined(whole[1], len(stems)),
                held_inputs=held[0],
                held_outputs=_joined(held[1], len(stems)),
            )


def _joined(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the outputs of each projection: of one that is stored fused, all of them together."""
    return tuple(sizes) if count > 1 else (sum(sizes),)
