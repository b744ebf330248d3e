"""Settings that several processes share: the server, its queues, the log."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, field_validator
from pydantic_settings import NoDecode

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import DEFAULT_QUEUE, MAX_PARTITIONS, QueueKeys
from inferq.protocol.servers import DEFAULT_URL, ServerUrl
from inferq.runtime.settings import ProcessSettings, read_list

#: The settings of `ServerSettings`: they mean the same to every process.
SERVER_SETTINGS: Final = frozenset(
    {"redis_url", "log_level", "log_format", "log_prompts", "tracing_endpoint"}
)
#: The settings of `BatchSettings`, which gateways and tasks have alike.
BATCH_SETTINGS: Final = frozenset({"batch_storage", "batch_storage_endpoint", "batch_file_age_s"})


def _check_queue(name: str) -> str:
    try:
        QueueKeys(name)
    except InvalidRequestError as error:
        raise ValueError(f"{name[:120]!r} {str(error).removeprefix('queue: ')}") from None
    return name


#: A queue's name.
QueueName = Annotated[str, AfterValidator(_check_queue)]


class ServerSettings(ProcessSettings):
    """Which server a process speaks to, what it logs, and where its traces go."""

    redis_url: SecretStr = Field(
        SecretStr(DEFAULT_URL),
        description="URL of the server, credentials included; docs/reliability.md has the forms.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe log lines to write."
    )
    log_format: Literal["auto", "json", "pretty"] = Field(
        "auto", description="Form of log lines; auto is pretty on a terminal, JSON elsewhere."
    )
    log_prompts: bool = Field(
        False,
        description="Log what jobs ask and get, at most 1,000 characters of each text, and what "
        "errors about them say.",
    )
    tracing_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector that takes traces by OTLP over HTTP, such "
        "as http://collector:4318; default: $OTEL_EXPORTER_OTLP_ENDPOINT, else no traces.",
    )

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, url: SecretStr) -> SecretStr:
        """Refuse what no client can be made from; the message shows none of it."""
        try:
            ServerUrl.parse(url.get_secret_value())
        except InvalidRequestError as error:
            raise ValueError(str(error).removeprefix("url: ")) from None
        return url

    @field_validator("tracing_endpoint")
    @classmethod
    def _check_tracing_endpoint(cls, url: str | None) -> str | None:
        try:
            parts = urlsplit(url or "http://none")
            is_whole = parts.scheme in ("http", "https") and bool(parts.hostname)
            is_whole = is_whole and not (parts.query or parts.fragment) and parts.port != 0
        except ValueError:
            is_whole = False
        if not is_whole:
            raise ValueError("must be http://HOST[:PORT] or https://HOST[:PORT]")
        return url


class QueuesSettings(ServerSettings):
    """Which queues a process deals with, and how they are split."""

    stand_ins: ClassVar[Mapping[str, str]] = {"queues": "INFERQ_QUEUE"}

    queues: Annotated[tuple[QueueName, ...], NoDecode] = Field(
        default_factory=lambda: (os.environ.get("INFERQ_QUEUE", DEFAULT_QUEUE),),
        validate_default=True,
        min_length=1,
        max_length=64,
        description="Queues, several times or joined by commas; of a gateway the first that serves "
        "a model gets its jobs; default: $INFERQ_QUEUE, else default.",
    )
    partitions: int = Field(
        1,
        ge=1,
        le=MAX_PARTITIONS,
        description="Into how many partitions each queue is split; the same for all its producers.",
    )

    @field_validator("queues", mode="before")
    @classmethod
    def _read_queues(cls, given: Any) -> Any:
        return read_list(given)

    @field_validator("queues")
    @classmethod
    def _check_queues(cls, queues: tuple[str, ...]) -> tuple[str, ...]:
        for queue in queues:
            if queues.count(queue) > 1:
                raise ValueError(f"{queue!r} is there twice")
        return queues


class BatchSettings(QueuesSettings):
    """Where the files of batches lie, for those who take them and those who run them."""

    batch_storage: str | None = Field(
        None,
        min_length=1,
        description="Where files of batches are kept: a folder that all processes share, or "
        "s3://bucket/prefix; default: there are no batches.",
    )
    batch_storage_endpoint: str | None = Field(
        None,
        min_length=1,
        description="URL of a storage that speaks like S3; default: as AWS clients are configured.",
    )
    batch_file_age_s: int = Field(
        30 * 86_400,
        ge=3600,
        le=3650 * 86_400,
        description="Seconds that files are kept that were not given a time, and ended batches.",
    )
