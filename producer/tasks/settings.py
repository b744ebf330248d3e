"""The settings of a tasks process."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from inferq.producer.async_client import DEFAULT_QUEUE_LIMIT
from inferq.producer.tasks.signing import Secrets, read_secret, read_secrets_file
from inferq.runtime.settings import FilePath, read_list
from inferq.runtime.shared_settings import BATCH_SETTINGS, SERVER_SETTINGS, BatchSettings
from inferq.runtime.variables import TASKS_PREFIX

_DAY_S: Final = 86_400
#: Together a day, but for some minutes.
_RETRY_DELAYS_S: Final = (
    5.0,
    30.0,
    120.0,
    600.0,
    1800.0,
    3600.0,
    7200.0,
    14400.0,
    28800.0,
    28800.0,
)


class TasksSettings(BatchSettings):
    """What a tasks process needs: the server and its queues, webhooks, and upkeep."""

    model_config = SettingsConfigDict(env_prefix=TASKS_PREFIX)
    shared: ClassVar[frozenset[str]] = (
        SERVER_SETTINGS | BATCH_SETTINGS | {"partitions", "queue_limit"}
    )
    repeated: ClassVar[frozenset[str]] = frozenset({"queues", "webhook_allowed_networks"})

    workers: int = Field(
        2,
        ge=1,
        le=64,
        description="Processes that perform tasks; each makes up to 32 deliveries at once.",
    )
    poll_interval_s: float = Field(
        0.5, ge=0.01, le=60, description="Seconds between two looks for what there is to do."
    )
    webhook_secrets_file: FilePath | None = Field(
        None,
        description="JSON file of the secrets that sign webhooks, by name (whsec_…, or a list of "
        "them while one is being replaced); read again at least once a minute.",
    )
    webhook_secrets: SecretStr | None = Field(
        None,
        description="NAME=SECRET of more of them, joined by commas; the file's win.",
    )
    webhook_timeout_s: float = Field(
        15.0,
        gt=0,
        le=300,
        description="Seconds that a receiver has to answer, from the look-up of its name on.",
    )
    webhook_retry_delays_s: Annotated[tuple[float, ...], NoDecode] = Field(
        _RETRY_DELAYS_S,
        min_length=1,
        max_length=100,
        description="Seconds after each failed try until the next, joined by commas; when they are "
        "used up, the delivery is dead.",
    )
    webhook_host_rate: float = Field(
        10.0,
        gt=0,
        le=100_000,
        description="Most calls of one host in a second, over all processes.",
    )
    webhook_allow_http: bool = Field(
        False, description="Deliver to http:// too, where anyone on the way can read."
    )
    webhook_allowed_networks: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        max_length=64,
        description="Networks such as 10.1.0.0/16 that webhooks may go to although they are not "
        "public, several times or joined by commas; default: none.",
    )
    sweep_interval_s: float = Field(
        60.0,
        ge=0.1,
        le=_DAY_S,
        description="Seconds between two sweeps behind dead workers, which recount the load too.",
    )
    promote_interval_s: float = Field(
        5.0,
        ge=0.1,
        le=_DAY_S,
        description="Seconds between two looks for delayed jobs that are due while no worker is "
        "there to take them.",
    )
    dead_letter_age_s: float = Field(
        14 * _DAY_S,
        ge=1,
        le=3650 * _DAY_S,
        description="Seconds after which dead letters are removed.",
    )
    queue_limit: int = Field(
        DEFAULT_QUEUE_LIMIT,
        ge=1,
        le=2**31 - 1,
        description="Most jobs in a partition before a batch waits with its next lines.",
    )
    batch_window: int = Field(
        256, ge=1, le=4096, description="Most lines of a batch that are in the queue at once."
    )
    batch_lease_s: float = Field(
        30.0,
        ge=1,
        le=600,
        description="Seconds without a sign of life after which a batch goes to another process.",
    )
    health_port: int = Field(
        0, ge=0, le=65_535, description="Port that answers /livez, /readyz and /metrics; 0: none."
    )
    health_host: str | None = Field(
        None, min_length=1, description="Address of the health port; default: all."
    )
    shutdown_timeout_s: float = Field(
        25.0,
        ge=0,
        le=3600,
        description="Seconds after SIGTERM for tasks under way; keep it below the grace period of "
        "the platform.",
    )

    def read_secrets(self) -> Secrets:
        """Return the secrets that sign; raise `InvalidRequestError` for a file that is none."""
        given = self.webhook_secrets
        secrets = {} if given is None else _parse_secrets(given.get_secret_value())
        if self.webhook_secrets_file is not None:
            secrets |= read_secrets_file(self.webhook_secrets_file)
        return secrets

    @field_validator("webhook_allowed_networks", "webhook_retry_delays_s", mode="before")
    @classmethod
    def _read_list(cls, given: Any) -> Any:
        return read_list(given)

    @field_validator("webhook_secrets")
    @classmethod
    def _check_secrets(cls, given: SecretStr | None) -> SecretStr | None:
        if given is not None:
            _parse_secrets(given.get_secret_value())
        return given

    @field_validator("webhook_retry_delays_s")
    @classmethod
    def _check_delays(cls, delays: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 < delay <= 7 * _DAY_S for delay in delays):
            raise ValueError("every delay must be above 0 and at most 7 days")
        return delays

    @field_validator("webhook_allowed_networks")
    @classmethod
    def _check_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ipaddress.ip_network(network)
        return networks


def _parse_secrets(text: str) -> dict[str, tuple[bytes, ...]]:
    """Read NAME=SECRET pairs; raise `ValueError` that shows no secret."""
    secrets: dict[str, tuple[bytes, ...]] = {}
    for part in text.split(","):
        name, sign, secret = part.strip().partition("=")
        if not name or not sign:
            raise ValueError("must be NAME=SECRET, joined by commas")
        if name in secrets:
            raise ValueError(f"{name!r} is there twice")
        try:
            secrets[name] = (read_secret(secret),)
        except ValueError as error:
            raise ValueError(f"{name!r} {error}") from None
    return secrets
