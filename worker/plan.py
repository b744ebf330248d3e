"""How many KV blocks a GPU will hold beside a model, before there is a GPU: an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from inferq.protocol.errors import InvalidRequestError, ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.architecture.serving_limits import (
    check_triton_heads,
    served_dtype,
    served_length,
)
from inferq.worker.model.loading.loader import weight_files
from inferq.worker.model.loading.model_store import resolve_model
from inferq.worker.model.loading.quantization import check_quantized_checkpoint
from inferq.worker.model.loading.refusals import PickledWeights
from inferq.worker.model.ranks.parallel import Share, check_division
from inferq.worker.model.running.kv_cache import KVCacheShape

MIB: Final = 2**20
GIB: Final = 2**30
#: Memory of GPUs in MiB, as their drivers report it.
GPU_MIB: Final[Mapping[str, int]] = MappingProxyType(
    {
        "t4": 15_360,
        "a10g": 23_028,
        "l4": 23_034,
        "rtx4090": 24_564,
        "a100-40gb": 40_960,
        "l40s": 46_068,
        "a100-80gb": 81_920,
        "h100": 81_559,
        "h200": 143_771,
        "b200": 183_359,
    }
)
#: Tokens per second that one server publishes with room to spare; docs/benchmarks.md measures it.
SERVER_TOKENS_PER_S: Final = 40_000
#: What a CUDA context, its libraries' workspaces and captured graphs take, roughly.
_CONTEXT_BYTES: Final = 1 * GIB
#: The device that is planned for; there may be none here.
_DEVICE: Final = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a worker; the names are those of its settings, lengths are in tokens."""

    gpu_bytes: int
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes on each GPU, and what the KV cache of one worker holds."""

    weight_bytes: int
    step_bytes: int
    cache_bytes: int
    block_bytes: int
    block_size: int
    num_blocks: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        """KV tokens of the cache."""
        return self.num_blocks * self.block_size

    def jobs_of(self, num_tokens: int) -> int:
        """Return how many jobs of that many tokens, prompt and output, fit at once."""
        return self.num_blocks // -(-num_tokens // self.block_size)


def memory_of(gpu: str) -> int:
    """Return the bytes of a GPU by its name, or by a number of GiB as text."""
    if (known := GPU_MIB.get(gpu.lower())) is not None:
        return known * MIB
    try:
        gibibytes = float(gpu)
    except ValueError:
        gibibytes = 0.0
    if not 0 < gibibytes < 2**20:
        raise InvalidRequestError(
            f"{gpu!r} is neither a number of GiB nor one of {', '.join(GPU_MIB)}", field="gpu"
        )
    return int(gibibytes * GIB)


def make_plan(model: str, demand: Demand, weight_bytes: int | None = None) -> Plan:
    """Plan for a folder with a model, or with its config.json if `weight_bytes` is given.

    Raises `ModelError` for a folder that says too little, and for a model that does not fit, with
    the numbers; and what a worker of these settings raises before it loads weights.
    """
    folder = Path(resolve_model(model)).expanduser()
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder}")
    _check_settings(model, demand)
    config = ModelConfig.read(folder)
    longest = served_length(config, demand.max_model_len)
    dtype = served_dtype("auto", config, _DEVICE)
    ranks = demand.tensor_parallel_size
    check_division(config, ranks)
    check_quantized_checkpoint(config.quantization, None, _DEVICE, dtype)
    check_triton_heads(config, _DEVICE)
    share = Share(config, 0, ranks).config
    weights = -(-(_size_of(folder) if weight_bytes is None else weight_bytes) // ranks)
    step = _step_bytes(share, demand, dtype)
    block = KVCacheShape.of(share, demand.block_size, dtype).block_bytes
    cache = int(demand.gpu_bytes * demand.gpu_memory_utilization) - weights - step
    blocks = max(0, cache) // block
    if blocks * demand.block_size < longest:
        raise ModelError(
            f"of {demand.gpu_bytes / GIB:.1f} GiB, weights take {weights / GIB:.1f} and a step "
            f"{step / GIB:.1f}: {blocks} blocks of {block / MIB:.2f} MiB remain, which do not hold "
            f"one job of {longest} tokens; take more GPUs, or a lower max_model_len",
            field="max_model_len",
        )
    return Plan(weights, step, cache, block, demand.block_size, blocks, longest)


def _check_settings(model: str, demand: Demand) -> None:
    """Raise `InvalidRequestError` for settings with which no worker starts."""
    EngineConfig(
        model=model,
        tensor_parallel_size=demand.tensor_parallel_size,
        gpu_memory_utilization=demand.gpu_memory_utilization,
        max_model_len=demand.max_model_len,
        block_size=demand.block_size,
        max_num_seqs=demand.max_num_seqs,
        max_num_batched_tokens=demand.max_num_batched_tokens,
    )


def _size_of(folder: Path) -> int:
    """Return the bytes of the files that a worker reads."""
    try:
        return sum(file.stat().st_size for file in weight_files(folder))
    except PickledWeights:
        raise
    except ModelError as error:
        raise ModelError(
            f"{folder} has no weights; say how large they are by --weights-gib ({error})"
        ) from None


def _step_bytes(share: ModelConfig, demand: Demand, dtype: torch.dtype) -> int:
    """Estimate what the largest step needs on a rank, beside weights and cache.

    The widest layer's inputs and outputs for all tokens of a step, three float32 copies of the
    logits of all sequences, and the context.
    """
    wide = 2 * share.intermediate_size + 6 * share.hidden_size
    hidden = demand.max_num_batched_tokens * wide * dtype.itemsize
    logits = 3 * 4 * demand.max_num_seqs * share.vocab_size
    return hidden + logits + _CONTEXT_BYTES
