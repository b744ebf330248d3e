"""How many KV blocks a GPU will hold beside a model, before there is a GPU: an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from inferq.protocol.errors import InvalidRequestError, ModelError
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.loading.model_store import resolve_model

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
_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    the numbers.
    """
    folder = Path(resolve_model(model)).expanduser()
    if not folder.is_dir():
        raise ModelError(f"there is no folder {folder}")
    config = ModelConfig.read(folder)
    ranks = demand.tensor_parallel_size
    weights = -(-(_size_of(folder) if weight_bytes is None else weight_bytes) // ranks)
    step = _step_bytes(config, demand)
    block = _block_bytes(config, demand)
    cache = int(demand.gpu_bytes * demand.gpu_memory_utilization) - weights - step
    longest = demand.max_model_len or config.max_position_embeddings
    plan = Plan(weights, step, max(0, cache), block, demand.block_size, 0, longest)
    blocks = plan.cache_bytes // block
    if blocks * demand.block_size < longest:
        raise ModelError(
            f"of {demand.gpu_bytes / GIB:.1f} GiB, weights take {weights / GIB:.1f} and a step "
            f"{step / GIB:.1f}: {blocks} blocks of {block / MIB:.2f} MiB remain, which do not hold "
            f"one job of {longest} tokens; take more GPUs, or a lower max_model_len",
            field="max_model_len",
        )
    return Plan(weights, step, cache, block, demand.block_size, blocks, longest)


def _size_of(folder: Path) -> int:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not size:
        raise ModelError(f"{folder} has no weights; say how large they are by --weights-gib")
    return size


def _block_bytes(config: ModelConfig, demand: Demand) -> int:
    """Return the bytes of a block on one rank; KV heads are repeated where they are too few."""
    heads = -(-config.num_kv_heads // demand.tensor_parallel_size)
    values = config.num_layers * 2 * demand.block_size * heads * config.head_dim
    return values * _DTYPE_BYTES[config.dtype or "float32"]


def _step_bytes(config: ModelConfig, demand: Demand) -> int:
    """Estimate what the largest step needs beside weights and cache.

    The widest layer's inputs and outputs for all tokens of a step, three float32 copies of the
    logits of all sequences, and the context.
    """
    wide = 2 * config.intermediate_size // demand.tensor_parallel_size + 6 * config.hidden_size
    hidden = demand.max_num_batched_tokens * wide * _DTYPE_BYTES[config.dtype or "float32"]
    logits = 3 * 4 * demand.max_num_seqs * config.vocab_size
    return hidden + logits + _CONTEXT_BYTES
