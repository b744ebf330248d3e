"""The tensor that holds all keys and values, and how many blocks of it there are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from inferq.kernels.huge_pages import huge_zeros
from inferq.protocol.errors import ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.architecture.causal_model import ModelShape
from inferq.worker.model.sizing.memory import available_memory, format_bytes

#: Share of the host's available memory that the cache takes by default, and its usual cap: enough
#: for small models, while the machine stays usable for other work.
CPU_MEMORY_SHARE: Final = 0.25
CPU_MEMORY_CAP: Final = 4 * 2**30
#: GiB of host memory for swapped blocks beside a GPU; on the CPU both pools are the same memory.
DEFAULT_SWAP_SPACE: Final = 4.0


def settle_kv_cache_dtype(
    config: EngineConfig, model: torch.dtype, device: torch.device, *, is_quantized: bool
) -> EngineConfig:
    """Return the options with what the cache holds, beside a model that computes in `model`.

    Beside quantized weights on the CPU that is bfloat16 by default: half the memory to read, and an
    error far below theirs. Raises `ModelError` for another type than the model's on CUDA.
    """
    if config.kv_cache_dtype == "auto":
        halves = is_quantized and device.type == "cpu" and model == torch.float32
        chosen = "bfloat16" if halves else str(model).removeprefix("torch.")
        return dataclasses.replace(config, kv_cache_dtype=chosen)
    if device.type == "cuda" and getattr(torch, config.kv_cache_dtype) != model:
        raise ModelError(
            f"{config.kv_cache_dtype} is not supported on CUDA beside a model in "
            f"{str(model).removeprefix('torch.')}: its attention reads the model's own type",
            field="kv_cache_dtype",
        )
    return config


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    """What one block holds: all layers' keys and values of `block_size` tokens."""

    layers: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: ModelShape, block_size: int, dtype: torch.dtype) -> KVCacheShape:
        """Return the shape that `model` needs."""
        return cls(model.num_layers, block_size, model.num_kv_heads, model.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        values = self.layers * 2 * self.block_size * self.kv_heads * self.head_dim
        return values * self.dtype.itemsize

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int, device: torch.device) -> Tensor:
        """Return zeros [blocks, layers, 2, block_size, kv_heads, head_dim].

        On the CPU the system commits pages when they are first written, so that an idle pool
        costs nothing. Raises `ModelError` with the numbers where the memory cannot be had.
        """
        try:
            return self._zeros(num_blocks, device)
        except (MemoryError, torch.OutOfMemoryError):
            size = format_bytes(num_blocks * self.block_bytes)
            raise ModelError(
                f"{num_blocks} KV blocks need {size} of memory, which {device} does not have",
                field="num_kv_blocks",
            ) from None

    def _zeros(self, num_blocks: int, device: torch.device) -> Tensor:
        shape = (num_blocks, self.layers, 2, self.block_size, self.kv_heads, self.head_dim)
        if device.type != "cpu" or not num_blocks:
            return torch.zeros(shape, dtype=self.dtype, device=device)
        return huge_zeros(shape, self.dtype)

    def allocate_on_host(self, num_blocks: int, device: torch.device) -> Tensor:
        """Return host memory for `num_blocks` blocks of `device`, pinned where that is a GPU."""
        if device.type != "cuda":
            return self.allocate(num_blocks, torch.device("cpu"))
        shape = (num_blocks, self.layers, 2, self.block_size, self.kv_heads, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, pin_memory=True)


def pool_size(
    config: EngineConfig, shape: KVCacheShape, max_model_len: int, budget: int, free: int
) -> int:
    """Return the number of blocks: `num_kv_blocks`, or what `budget` bytes hold.

    Raises `ModelError` with the numbers where not one request of `max_model_len` fits, or the pool
    is larger than the `free` bytes of the device.
    """
    needed = shape.blocks_for(max_model_len)
    blocks = config.num_kv_blocks or budget // shape.block_bytes
    if blocks < needed:
        raise ModelError(_too_small(config, shape, max_model_len, blocks), field="max_model_len")
    _check_memory(config, shape, blocks, free)
    return blocks


def _check_memory(config: EngineConfig, shape: KVCacheShape, blocks: int, free: int) -> None:
    if (size := blocks * shape.block_bytes) <= free:
        return
    if config.num_kv_blocks is not None:
        field, most = "num_kv_blocks", free // shape.block_bytes
    else:
        field, most = "kv_cache_memory", free
    raise ModelError(
        f"{blocks} KV blocks need {format_bytes(size)}, but {format_bytes(free)} are free: "
        f"lower {field} to at most {most}",
        field=field,
    )


def swap_pool_size(config: EngineConfig, shape: KVCacheShape, device: torch.device) -> int:
    """Return the number of host blocks for swapped sequences: `num_swap_blocks`, or `swap_space`.

    None where sequences are never swapped. Raises `ModelError` with the numbers where the host has
    less memory than `swap_space` asks, of each rank.
    """
    if config.preemption_mode == "recompute":
        return 0
    blocks = config.num_swap_blocks
    if blocks is None:
        default = DEFAULT_SWAP_SPACE if device.type == "cuda" else 0.0
        space = default if config.swap_space is None else config.swap_space
        blocks = int(space * 2**30) // shape.block_bytes
    free = available_memory() // config.tensor_parallel_size
    if (size := blocks * shape.block_bytes) > free:
        raise ModelError(
            f"{blocks} blocks of host memory need {format_bytes(size)}, but "
            f"{format_bytes(free)} are free: lower swap_space to at most {free / 2**30:.1f}",
            field="swap_space" if config.num_swap_blocks is None else "num_swap_blocks",
        )
    return blocks


def cpu_budget(config: EngineConfig, shape: KVCacheShape, max_model_len: int) -> int:
    """Return the cache's bytes on the CPU: `kv_cache_memory`, or a share of what is free.

    The default share, which all ranks divide, goes beyond its cap only as far as one full-length
    request needs.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    one_request = shape.blocks_for(max_model_len) * shape.block_bytes
    ranks = config.tensor_parallel_size
    share = int(available_memory() * CPU_MEMORY_SHARE) // ranks
    return min(share, max(CPU_MEMORY_CAP // ranks, one_request))


def _too_small(config: EngineConfig, shape: KVCacheShape, max_model_len: int, blocks: int) -> str:
    needed = shape.blocks_for(max_model_len)
    held = blocks * shape.block_size
    if config.num_kv_blocks is not None:
        enlarge = f"num_kv_blocks to at least {needed}"
    elif config.kv_cache_memory is not None or config.device == "cpu":
        enlarge = f"kv_cache_memory to at least {needed * shape.block_bytes}"
    else:
        enlarge = "kv_cache_memory or gpu_memory_utilization"
    shrink = f"lower max_model_len to at most {held}, or " if held else ""
    return (
        f"one request of {max_model_len} tokens needs {needed} KV blocks "
        f"({format_bytes(needed * shape.block_bytes)}), but the pool has {blocks} "
        f"({format_bytes(blocks * shape.block_bytes)}): {shrink}raise {enlarge}"
    )
