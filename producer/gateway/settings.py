"""Every setting of a gateway, from flags and environment alike; read once, then immutable."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from inferq.producer.async_client import DEFAULT_QUEUE_LIMIT
from inferq.protocol.messages import MAX_NAME_BYTES
from inferq.protocol.scripts import MAX_RETENTION_MS
from inferq.runtime.settings import FilePath, read_list, read_pairs
from inferq.runtime.shared_settings import BATCH_SETTINGS, SERVER_SETTINGS, BatchSettings
from inferq.runtime.variables import GATEWAY_PREFIX

_MAX_COUNT: Final = 2**31 - 1
_DAY_S: Final = 86_400


class GatewaySettings(BatchSettings):
    """What a gateway process needs: the server and its queues, its socket, and its limits."""

    model_config = SettingsConfigDict(env_prefix=GATEWAY_PREFIX)
    shared: ClassVar[frozenset[str]] = (
        SERVER_SETTINGS | BATCH_SETTINGS | {"partitions", "queue_limit"}
    )
    repeated: ClassVar[frozenset[str]] = frozenset({"queues", "models", "cors_origins"})

    queue_limit: int = Field(
        DEFAULT_QUEUE_LIMIT,
        ge=1,
        le=_MAX_COUNT,
        description="Most jobs in a partition before requests are refused with 429.",
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="TCP port that answers /metrics, which the API's then does not; 0 takes a free "
        "one; default: the API's own.",
    )
    metrics_host: str | None = Field(
        None, min_length=1, description="Address of that port; default: that of --host."
    )
    models: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=dict,
        description="NAME=QUEUE of models that are known even while no worker lives, several times "
        "or joined by commas.",
    )
    accept_without_workers: bool = Field(
        False,
        description="Let jobs for the names in models wait in the queue while no worker lives, so "
        "that an autoscaler can start one; otherwise they are refused with 503.",
    )
    accept_webhooks: bool = Field(
        False,
        description="Take webhook in requests; `inferq tasks` must run for the queues to deliver "
        "them.",
    )
    api_keys_file: FilePath | None = Field(
        None,
        description="JSON file of API keys' digests and limits, read again when it changes; "
        "default: no key is asked for.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        max_length=64,
        description="Origins whose pages may call the API from a browser (* for all), several "
        "times or joined by commas; default: none.",
    )
    max_body_bytes: int = Field(
        16 * 2**20,
        ge=1024,
        le=2**30,
        description="Longest request body in bytes; a prompt may have 4 MiB.",
    )
    max_bodies_bytes: int = Field(
        128 * 2**20,
        ge=1024,
        le=2**40,
        description="Bytes of request bodies held at once, over all requests that are being read.",
    )
    max_prompts: int = Field(
        1024, ge=1, le=2**20, description="Most prompts in one request; each becomes a job."
    )
    max_outputs: int = Field(
        2048, ge=1, le=2**20, description="Most outputs of one request: prompts times n or best_of."
    )
    max_concurrent_requests: int = Field(
        4096,
        ge=1,
        le=_MAX_COUNT,
        description="Most requests that wait for tokens at once, streams included; more get 503.",
    )
    request_timeout_s: float = Field(
        600.0,
        gt=0,
        le=_DAY_S,
        description="Longest wait in seconds for an answer that is not streamed, and for the next "
        "token of one that is.",
    )
    keep_alive_s: float = Field(
        15.0,
        gt=0,
        le=3600,
        description="Seconds without a token after which a stream gets a comment, which keeps "
        "proxies from closing it.",
    )
    retention_s: float = Field(
        3600.0,
        ge=1,
        le=MAX_RETENTION_MS // 1000,
        description="Seconds that results are kept after their last event, for resuming.",
    )
    default_max_tokens: int | None = Field(
        None,
        ge=1,
        le=_MAX_COUNT,
        description="max_tokens of chats that give none; default: to the end of the context.",
    )
    tool_format: Literal["hermes", "json"] = Field(
        "hermes",
        description="How the models write tool calls: hermes in tags (Qwen, Hermes, SmolLM), json "
        "as a bare object (Llama 3).",
    )
    poll_interval_s: float = Field(
        1.0, ge=0.05, le=60, description="Seconds between two looks at the workers' reports."
    )
    shutdown_delay_s: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="Seconds from SIGTERM, when /readyz begins to fail, until connections are "
        "refused: the time a load balancer needs to notice.",
    )
    shutdown_timeout_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="Seconds after that for requests in flight; streams are ended at once, for "
        "clients to resume elsewhere.",
    )

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _read_list(cls, given: Any) -> Any:
        return read_list(given)

    @field_validator("models", mode="before")
    @classmethod
    def _read_models(cls, given: Any) -> Any:
        return read_pairs(given, "NAME=QUEUE") if given != "" else {}

    @field_validator("models")
    @classmethod
    def _check_models(cls, models: dict[str, str]) -> dict[str, str]:
        for name in models:
            if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
                raise ValueError(f"{name[:80]!r} is not a name of 1 to {MAX_NAME_BYTES} bytes")
        return models

    @model_validator(mode="after")
    def _check_model_queues(self) -> Self:
        for name, queue in self.models.items():
            if queue not in self.queues:
                raise ValueError(
                    f"--models: {name}={queue} names a queue that is not in --queues "
                    f"({', '.join(self.queues)})"
                )
        return self

    @model_validator(mode="after")
    def _check_accepting(self) -> Self:
        if self.accept_without_workers and not self.models:
            raise ValueError(
                "--accept-without-workers needs --models: without a worker nothing else says which "
                "models there are"
            )
        return self

    @model_validator(mode="after")
    def _check_body_limits(self) -> Self:
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"--max-bodies-bytes ({self.max_bodies_bytes}) must be at least --max-body-bytes "
                f"({self.max_body_bytes})"
            )
        return self
