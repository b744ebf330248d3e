"""Every setting of a worker, from flags, environment and files alike; read once, then immutable."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import DEFAULT_QUEUE
from inferq.protocol.scripts import MAX_RETENTION_MS, STARVE_MS
from inferq.runtime import settings, variables
from inferq.runtime.shared_settings import QueueName, ServerSettings
from inferq.worker.engine.config import check_adapters
from inferq.worker.kernel_choice import native_kernels

ENV_PREFIX: Final = variables.ENV_PREFIX

_MAX_COUNT: Final = 2**31 - 1
_DAY_S: Final = 86_400


def _default_worker_name() -> str:
    # Containers may have equal host names, and each a process 1; one name means one worker.
    return f"{socket.gethostname()[:180]}-{os.getpid()}-{secrets.token_hex(3)}"


class EngineSettings(settings.ProcessSettings):
    """What shapes the engine; the same names as the arguments of `LLM`."""

    other_flags: ClassVar[Mapping[str, tuple[str, ...]]] = {"lora_adapters": ("--lora",)}
    repeated: ClassVar[frozenset[str]] = frozenset({"lora_adapters"})

    model: str = Field(
        description="Model to serve: a folder in Hugging Face form, or a hub id.", min_length=1
    )
    revision: str | None = Field(
        None, min_length=1, description="Branch, tag or commit of a hub id; default: main."
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Whether sampling parameters that a job leaves out come from the model's "
        "generation_config.json.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of weights and activations; auto takes the model's own."
    )
    quantization: Literal["int8", "awq", "gptq"] | None = Field(
        None,
        description="int8 rounds weights and the activations that they meet to 8 bits (CPU only); "
        "awq and gptq ask for a checkpoint of that format; default: the checkpoint's own.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto takes a GPU where there is one."
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="Ranks among which the model is divided: that many GPUs, or processes on the "
        "CPU; sizes of KV cache and swap space are those of each.",
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block (page).")
    max_model_len: int | None = Field(
        None,
        ge=1,
        le=_MAX_COUNT,
        description="Longest prompt plus output, in tokens; default: the model's own.",
    )
    kv_cache_memory: int | None = Field(
        None, ge=1, lt=2**63, description="Bytes of KV cache; default: a share of what is free."
    )
    num_kv_blocks: int | None = Field(
        None,
        ge=1,
        le=_MAX_COUNT,
        description="Number of KV blocks, instead of sizing the pool by memory.",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of a GPU's memory that the worker may use."
    )
    max_num_seqs: int = Field(256, ge=1, le=_MAX_COUNT, description="Most sequences in one step.")
    max_num_batched_tokens: int = Field(
        2048, ge=1, le=_MAX_COUNT, description="Most tokens in one step."
    )
    enable_prefix_caching: bool = Field(
        True, description="Share the KV blocks of equal prompt beginnings."
    )
    long_prefill_token_threshold: int = Field(
        0, ge=0, le=_MAX_COUNT, description="Most tokens of one prompt in one step; 0: no limit."
    )
    max_prefill_delay_ms: int | None = Field(
        None,
        ge=0,
        le=_MAX_COUNT,
        description="By how many ms prompts may delay the next tokens of running sequences in each "
        "step; 0: no limit; default: 100 on the CPU, no limit on a GPU.",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Of the KV cache; auto: the model's, on a CPU bfloat16 beside int8 or AWQ.",
    )
    preemption_mode: Literal["auto", "recompute", "swap"] = Field(
        "auto",
        description="How a sequence gives way when blocks run out: compute it again later, move "
        "its blocks to host memory, or what costs less.",
    )
    swap_space: float | None = Field(
        None,
        ge=0,
        lt=2**20,
        description="GiB of host memory for swapped blocks; default: 4 on a GPU, else 0.",
    )
    num_swap_blocks: int | None = Field(
        None,
        ge=0,
        le=_MAX_COUNT,
        description="Number of swapped blocks, instead of sizing them by memory.",
    )
    async_scheduling: bool | None = Field(
        None,
        description="Plan a step while the one before it is computed; default: on a GPU only.",
    )
    enforce_eager: bool = Field(
        False, description="Capture no CUDA graphs, record no small steps on the CPU."
    )
    lora_adapters: Annotated[dict[str, str] | None, NoDecode] = Field(
        None,
        description="NAME=FOLDER of LoRA adapters in the form of PEFT, several times or joined by "
        "commas; jobs ask for them by NAME as model.",
    )
    max_lora_rank: int = Field(
        64, ge=1, le=4096, description="Largest rank that an adapter may have."
    )

    @field_validator("lora_adapters", mode="before")
    @classmethod
    def _read_adapters(cls, given: Any) -> Any:
        adapters: Any = settings.read_pairs(given, "NAME=FOLDER")
        if adapters is not None:
            try:
                check_adapters(adapters)
            except InvalidRequestError as error:
                raise ValueError(str(error).removeprefix("lora_adapters: ")) from None
        return adapters


class WorkerSettings(EngineSettings, ServerSettings):
    """What a worker process needs: the engine's settings, the queue's, and its own."""

    served_model_name: str | None = Field(
        None,
        min_length=1,
        description="Name under which jobs may ask for the model; default: its last part.",
    )
    queue: QueueName = Field(DEFAULT_QUEUE, description="Queue to serve.")
    partition: int = Field(0, ge=0, lt=1024, description="Partition of the queue to serve.")
    worker_name: str = Field(
        default_factory=_default_worker_name,
        min_length=1,
        max_length=200,
        description="Name in the queue's books; default: host, process id, random.",
    )
    max_jobs: int = Field(256, ge=1, le=_MAX_COUNT, description="Most jobs held at once.")
    lease_s: float = Field(
        20.0,
        ge=0.5,
        le=3600,
        description="Seconds without a sign of life before others take over.",
    )
    max_crashes: int = Field(
        3,
        ge=1,
        le=_MAX_COUNT,
        description="Workers that a job may bring down before it is dead-lettered.",
    )
    retention_s: float = Field(
        3600.0,
        ge=1,
        le=MAX_RETENTION_MS // 1000,
        description="Seconds that results are kept after their last event; at least two leases.",
    )
    drain_timeout_s: float = Field(
        25.0,
        ge=0,
        le=_DAY_S,
        description="Seconds to finish jobs after SIGTERM before they are handed over.",
    )
    step_timeout_s: float = Field(
        60.0,
        gt=0,
        le=_DAY_S,
        description="Seconds after which a step counts as hung and ends the process.",
    )
    starve_s: float = Field(
        STARVE_MS / 1000,
        ge=0,
        le=_DAY_S,
        description="Seconds a large job may wait while smaller ones pass it.",
    )
    report_interval_s: float = Field(
        5.0, ge=0.05, le=60, description="Seconds between two reports of the worker's state."
    )
    health_port: int = Field(
        0,
        ge=0,
        le=65_535,
        description="Port that answers /livez, /readyz, /startupz and /metrics; 0: none.",
    )
    health_host: str | None = Field(
        None,
        min_length=1,
        description="Address on which the health port listens; default: every one.",
    )

    @model_validator(mode="after")
    def _check_retention(self) -> Self:
        if self.retention_s < 2 * self.lease_s:
            raise ValueError(
                f"--retention-s ({self.retention_s:.15g}) must be at least twice --lease-s "
                f"({self.lease_s:.15g}): a worker that takes a job over reads what was published"
            )
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.model_name in (self.lora_adapters or ()):
            raise ValueError(
                f"--lora-adapters: {self.model_name!r} is the name of the model itself; give the "
                "adapter another, or the model by --served-model-name"
            )
        return self

    @property
    def model_name(self) -> str:
        """The name that jobs use for the model."""
        return self.served_model_name or Path(self.model).name


def load_settings(given: Mapping[str, Any]) -> WorkerSettings:
    """Read the settings: `given` wins over the environment, that over the defaults.

    Raises `InvalidRequestError` that names every wrong setting and every misspelt variable.
    """
    further: list[str] = []
    try:
        native_kernels()
    except InvalidRequestError as error:
        further.append(str(error))
    return settings.load_settings(WorkerSettings, given, further)


def check_variable_names(environment: Mapping[str, str]) -> None:
    """Refuse variables with our prefix that no part of inferq reads."""
    settings.check_variable_names(WorkerSettings, environment)
