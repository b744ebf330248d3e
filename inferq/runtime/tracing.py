"""Whether a process makes traces: only if it is told where to send them, and how is installed.

Nothing of OpenTelemetry is imported before that is certain; `spans` is what imports it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from inferq.protocol.errors import InvalidRequestError, MissingExtraError

if TYPE_CHECKING:
    from inferq.runtime.spans import Tracing

#: OpenTelemetry's own variables that name a collector, the first that is set wins.
ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES: Final = (
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
)
_PROTOCOL: Final = "http/protobuf"
_EXPORTER: Final = "otlp"
_PATH: Final = "/v1/traces"


class Kind(StrEnum):
    """What a span is to the others: the names are OpenTelemetry's."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"
    PRODUCER = "producer"
    CONSUMER = "consumer"


def start_tracing(
    service: str, endpoint: str | None, *, instance: str | None = None
) -> Tracing | None:
    """Begin to make traces as a service, whose `instance` has a name; None if nobody wants any.

    `endpoint` is that of the settings. Without it, OpenTelemetry's variables decide, and without
    its packages they have no effect. Raises `InvalidRequestError` for what they ask for in vain,
    `MissingExtraError` if only the packages are missing for an `endpoint` of the settings.
    """
    if not is_wanted(endpoint, os.environ):
        return None
    _check_variables(os.environ)
    try:
        from inferq.runtime.spans import Tracing
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] != "opentelemetry":
            raise
        if endpoint is None:
            return None
        raise MissingExtraError("tracing", missing) from None
    url = None if endpoint is None else traces_url(endpoint)
    return Tracing.start(service, url, instance=instance)


def check_tracing(service: str, endpoint: str | None) -> None:
    """Raise what `start_tracing` would, in a process whose children make the traces."""
    if tracing := start_tracing(service, endpoint):
        tracing.close()


def is_wanted(endpoint: str | None, environment: Mapping[str, str]) -> bool:
    """Whether settings or variables name a collector, and none says that there be no traces."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    return endpoint is not None or any(environment.get(name) for name in ENDPOINT_VARIABLES)


def traces_url(endpoint: str) -> str:
    """Return where spans are sent, of a collector's base URL or that address itself."""
    base = endpoint.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH


def _check_variables(environment: Mapping[str, str]) -> None:
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter not in ("", _EXPORTER):
        raise InvalidRequestError(
            f"{exporter[:40]!r} is not supported; {_EXPORTER} and none are",
            field="OTEL_TRACES_EXPORTER",
        )
    for name in _PROTOCOL_VARIABLES:
        if protocol := environment.get(name, "").strip():
            if protocol != _PROTOCOL:
                raise InvalidRequestError(
                    f"{protocol[:40]!r} is not supported; {_PROTOCOL} is", field=name
                )
            return
