"""The options of one engine, checked where they are given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.messages import MAX_NAME_BYTES
from inferq.protocol.params import MAX_SEED

DTYPES: Final = ("auto", "float32", "float16", "bfloat16")
GENERATION_CONFIGS: Final = ("auto", "none")
QUANTIZATIONS: Final = ("int8", "awq", "gptq")
PREEMPTION_MODES: Final = ("auto", "recompute", "swap")
_DEVICE: Final = re.compile(r"auto|cpu|cuda(:\d+)?")
_MAX_COUNT: Final = 2**31 - 1
#: Ranks on one machine.
_MAX_RANKS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is served; immutable and validated.

    Raises `InvalidRequestError`, which names the option and the limit, on any value out of range.

    - `model`: a local folder or a hub id.
    - `revision`: branch, tag or commit of a hub id; None is its main branch.
    - `generation_config`: `auto` takes sampling parameters that a request leaves out from the
      model's generation_config.json, `none` does not.
    - `dtype`: of weights and KV cache; `auto` takes the model's own where the device is fast at it.
    - `quantization`: `int8` rounds weights to 8 bits when they are loaded, and activations when
      they are multiplied (CPU only); `awq` and `gptq` are for checkpoints with 4-bit weights of
      that format, and refuse others; None takes the checkpoint's own format, quantized or not.
    - `device`: `auto`, `cpu`, `cuda` or `cuda:<index>`.
    - `tensor_parallel_size`: ranks among which the model is divided: that many GPUs, or processes
      on the CPU. Sizes of KV cache and swap space are those of each rank.
    - `block_size`: tokens in one KV block, a power of two.
    - `max_model_len`: longest prompt and output together, in tokens; None takes the model's.
    - `kv_cache_memory`: bytes for the KV cache; None takes a share of what is free.
    - `num_kv_blocks`: number of KV blocks, instead of what the memory holds.
    - `gpu_memory_utilization`: share of a GPU's memory to use, in (0, 1].
    - `max_num_seqs`: most sequences that run at once.
    - `max_num_batched_tokens`: most tokens computed in one step.
    - `enable_prefix_caching`: reuse the KV blocks of equal prefixes.
    - `long_prefill_token_threshold`: most tokens of one prompt computed in one step; 0 is no limit.
    - `max_prefill_delay_ms`: by how much prompts may delay the next tokens of running sequences in
      each step; 0 is no limit, None is 100 on the CPU and no limit on CUDA.
    - `kv_cache_dtype`: of the KV cache; `auto` is the model's, but bfloat16 beside weights that are
      quantized on the CPU. CUDA takes the model's only.
    - `preemption_mode`: how a sequence gives way when blocks run out: `recompute` drops its blocks,
      `swap` moves them to host memory (recompute where that is full), `auto` does what costs less.
    - `swap_space`: host memory for swapped blocks, in GiB; None is 4 on CUDA and 0 on the CPU.
    - `num_swap_blocks`: number of those blocks, instead of what `swap_space` holds.
    - `async_scheduling`: plan and launch a step while the one before it is computed; None does so
      on CUDA.
    - `enforce_eager`: capture no CUDA graphs, record no small steps on the CPU.
    - `lora_adapters`: folders of adapters in the form of PEFT, by the names that requests use.
    - `max_lora_rank`: largest rank that an adapter may have.
    - `seed`: for offline requests without one of their own.
    """

    model: str
    revision: str | None = None
    generation_config: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    tensor_parallel_size: int = 1
    block_size: int = 16
    max_model_len: int | None = None
    kv_cache_memory: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    max_prefill_delay_ms: int | None = None
    kv_cache_dtype: str = "auto"
    preemption_mode: str = "auto"
    swap_space: float | None = None
    num_swap_blocks: int | None = None
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    lora_adapters: Mapping[str, str | Path] | None = None
    max_lora_rank: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidRequestError("must be a local folder or a hub id", field="model")
        if self.revision is not None and (not isinstance(self.revision, str) or not self.revision):
            _refuse("revision", self.revision, "a branch, tag or commit of a hub id")
        _check_choice("generation_config", self.generation_config, GENERATION_CONFIGS)
        _check_choice("dtype", self.dtype, DTYPES)
        if self.quantization is not None:
            _check_choice("quantization", self.quantization, QUANTIZATIONS)
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            _refuse("device", self.device, "auto, cpu, cuda or cuda:<index>")
        _check_count("tensor_parallel_size", self.tensor_parallel_size, 1, _MAX_RANKS)
        _check_count("block_size", self.block_size, 1, 256)
        if self.block_size & (self.block_size - 1):
            _refuse("block_size", self.block_size, "a power of two")
        _check_optional_count("max_model_len", self.max_model_len, 2)
        _check_optional_count("kv_cache_memory", self.kv_cache_memory, 1, 2**63 - 1)
        _check_optional_count("num_kv_blocks", self.num_kv_blocks, 1)
        _check_share("gpu_memory_utilization", self.gpu_memory_utilization)
        _check_count("max_num_seqs", self.max_num_seqs, 1)
        _check_count("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidRequestError(
                f"{self.max_num_batched_tokens} is less than max_num_seqs ({self.max_num_seqs}): "
                "a step must hold one token of every running sequence",
                field="max_num_batched_tokens",
                limit=self.max_num_seqs,
            )
        _check_count("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _check_optional_count("max_prefill_delay_ms", self.max_prefill_delay_ms, 0)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, DTYPES)
        _check_choice("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        _check_optional_size("swap_space", self.swap_space)
        _check_optional_count("num_swap_blocks", self.num_swap_blocks, 0)
        for name in ("enable_prefix_caching", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "true or false")
        if not isinstance(self.async_scheduling, bool | None):
            _refuse("async_scheduling", self.async_scheduling, "true, false or nothing")
        _check_count("max_lora_rank", self.max_lora_rank, 1, 4096)
        if self.lora_adapters is not None:
            check_adapters(self.lora_adapters)
        _check_count("seed", self.seed, 0, MAX_SEED)


def check_adapters(adapters: object) -> None:
    """Raise `InvalidRequestError` unless they are folders by names that a request can give."""
    if not isinstance(adapters, Mapping):
        raise InvalidRequestError(
            f"must be a map of names to folders, not {adapters!r}", field="lora_adapters"
        )
    for name, folder in adapters.items():
        is_name = isinstance(name, str) and name.isprintable()  # so that it is text in UTF-8
        if not is_name or not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            _refuse("lora_adapters", name, f"folders by names of 1 to {MAX_NAME_BYTES} bytes")
        if not isinstance(folder, (str, Path)) or not str(folder):
            _refuse("lora_adapters", folder, f"a folder for {name!r}")


def _refuse(field: str, value: object, limit: str) -> None:
    raise InvalidRequestError(f"must be {limit}, not {value!r}", field=field, limit=limit)


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        _refuse(field, value, " or ".join(choices))


def _check_optional_count(field: str, value: object, low: int, high: int = _MAX_COUNT) -> None:
    if value is not None:
        _check_count(field, value, low, high)


def _check_count(field: str, value: object, low: int, high: int = _MAX_COUNT) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        _refuse(field, value, f"a whole number in [{low}, {high}]")


def _check_share(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        _refuse(field, value, "a number in (0, 1]")


def _check_optional_size(field: str, value: object) -> None:
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < 2**20:  # type: ignore[operator]
        _refuse(field, value, "a number of GiB, at least 0")
