"""Section: decode attention as a share of the copy bandwidth, each layer of a cache in turn."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, partial

import torch
from torch import Tensor

from gpu.paged_case import LLAMA, Heads, batch_of, shuffled_tables
from gpu.records import Quantity, Record, Target
from gpu.section import Case, Settings, each
from gpu.timing import Call, copy_bandwidth, graph_seconds, normal
from inferq.kernels.triton_attention import TritonAttention, Tuning

BATCHES = (1, 8, 64, 256)
CONTEXTS = (512, 4096, 32768)
#: The case that the project set itself a target for.
TARGET_CASE, TARGET_SHARE = (64, 4096), 0.85
BLOCK_SIZE = 16
_POOL_BYTES = 40 << 30
_CHUNK = 1 << 29
#: Layers of the model, and as many as make the whole cache larger than any L2 cache.
_LAYERS, _MANY_BYTES = 32, 256 << 20


class Cache:
    """One large buffer of random values, seen as caches of different shapes."""

    def __init__(self, settings: Settings, heads: Heads) -> None:
        self._settings = settings
        self.heads = heads

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a copy, measured before the memory is taken."""
        return copy_bandwidth(self._settings)

    @cached_property
    def values(self) -> Tensor:
        """The buffer, of at most 0.6 of the free memory."""
        settings = self._settings
        count = 1 << 18
        if settings.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(settings.device)
            count = min(_POOL_BYTES, int(0.6 * free)) // settings.dtype.itemsize
        buffer = torch.empty(count, dtype=settings.dtype, device=settings.device)
        for first in range(0, count, _CHUNK):
            buffer[first : first + _CHUNK].normal_()
        return buffer

    def layers_for(self, blocks: int) -> int:
        """Give how many layers of so many blocks are to be had, at most what a figure needs."""
        layer = blocks * self._block_elements
        size = layer * self.values.element_size()
        wanted = max(_LAYERS, -(-_MANY_BYTES // size)) if not self._settings.smoke else 2
        return min(wanted, len(self.values) // layer)

    def view(self, blocks: int, layers: int) -> Tensor:
        """Give [blocks, layers, 2, block_size, kv_heads, head_dim]."""
        shape = (blocks, layers, 2, BLOCK_SIZE, self.heads.kv, self.heads.dim)
        return self.values[: blocks * layers * self._block_elements].view(shape)

    @property
    def _block_elements(self) -> int:
        return 2 * BLOCK_SIZE * self.heads.kv * self.heads.dim


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases: batches by contexts, then one ragged batch and one with a window."""
    cache = Cache(settings, Heads(4, 2, 64) if settings.smoke else LLAMA)
    batches = (1, 2) if settings.smoke else BATCHES
    contexts = (24, 40) if settings.smoke else CONTEXTS
    # The target first: it is what must be known.
    pairs = sorted(
        ((batch, context) for batch in batches for context in contexts),
        key=lambda pair: pair != TARGET_CASE,
    )
    for batch, context in pairs:
        name = f"batch {batch}, context {context}"
        lens = [context] * batch
        yield each(name, partial(measure, name, lens, cache, settings))
    longest = 48 if settings.smoke else 8192
    ragged = [longest * (index + 1) // 64 for index in range(64)][:: 32 if settings.smoke else 1]
    yield each("64 ragged, 128 to 8192", partial(measure, "64 ragged", ragged, cache, settings))
    lens, window = ([40], 16) if settings.smoke else ([16384] * 64, 4096)
    name = f"batch {len(lens)}, context {lens[0]}, window {window}"
    yield each(name, partial(measure, name, lens, cache, settings, window=window))
    batch, context = (2, 24) if settings.smoke else TARGET_CASE
    name = f"batch {batch}, context {context}, in a graph for up to {contexts[-1]}"
    lens = [context] * batch
    yield each(name, partial(measure, name, lens, cache, settings, bound=contexts[-1]))


def measure(
    name: str,
    lens: list[int],
    cache: Cache,
    settings: Settings,
    *,
    window: int | None = None,
    bound: int | None = None,
    tuning: Tuning | None = None,
) -> Record:
    """Time one layer's attention of one token each over caches of these lengths.

    `bound` is what a captured step plans for: the longest that a sequence may become.
    """
    bandwidth = cache.bandwidth
    heads = cache.heads
    sequences = [(length - 1, 1) for length in lens]
    tables, blocks = shuffled_tables(sequences, BLOCK_SIZE, settings.device)
    layers = cache.layers_for(blocks)
    if layers < 1:
        needed = blocks * 2 * BLOCK_SIZE * heads.kv * heads.dim * settings.dtype.itemsize
        return Record(name, note=f"left out: one layer needs {needed / 2**30:.1f} GiB")
    kv = cache.view(blocks, layers)
    ops = TritonAttention(settings.device, tuning)
    batch = batch_of(sequences, tables, BLOCK_SIZE, bound)
    query = normal(settings, len(lens), heads.query, heads.dim)
    scale = heads.dim**-0.5

    def layer_calls() -> list[Call]:
        plan = ops.plan(batch)
        return [
            partial(ops.attend, query, kv[:, layer], plan, scale=scale, window=window)
            for layer in range(layers)
        ]

    seconds = graph_seconds(layer_calls, settings)
    seen = sum(length if window is None else min(length, window) for length in lens)
    token = 2 * heads.kv * heads.dim * settings.dtype.itemsize
    moved = seen * token + 2 * query.numel() * query.element_size()
    is_target = name == "batch {}, context {}".format(*TARGET_CASE)
    return Record(
        name,
        {
            "time": Quantity(seconds * 1e6, "us"),
            "bandwidth": Quantity(moved / seconds / 1e9, "GB/s"),
            "share": Quantity(moved / seconds / bandwidth, "of copy bandwidth"),
            "layers": Quantity(layers),
        },
        Target("share", at_least=TARGET_SHARE) if is_target else None,
    )
