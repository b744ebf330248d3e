"""Webhooks: whom to tell of a job's end, and what is told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Self
from urllib.parse import urlsplit

from inferq.protocol.errors import DecodeError, InvalidRequestError
from inferq.protocol.messages import FinishReason
from inferq.protocol.param_checks import check_utf8
from inferq.protocol.trace_context import TraceContext, trace_from_wire, trace_to_wire
from inferq.protocol.wire import number, pack, text, typed, unpack

#: Longest URL of a receiver, in bytes.
MAX_URL_BYTES: Final = 2048
#: Longest webhook as it travels, in bytes.
MAX_WEBHOOK_BYTES: Final = 4096
#: The secret that signs where none is named.
DEFAULT_SECRET: Final = "default"  # noqa: S105 - the name of one

_SECRET_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class WebhookEvent(StrEnum):
    """How a job ended, as receivers are told."""

    COMPLETED = "job.completed"
    FAILED = "job.failed"
    CANCELLED = "job.cancelled"
    EXPIRED = "job.expired"


#: What each finish reason is to receivers.
EVENT_OF: Final[Mapping[FinishReason, WebhookEvent]] = MappingProxyType(
    {
        FinishReason.STOP: WebhookEvent.COMPLETED,
        FinishReason.LENGTH: WebhookEvent.COMPLETED,
        FinishReason.ERROR: WebhookEvent.FAILED,
        FinishReason.CANCELLED: WebhookEvent.CANCELLED,
        FinishReason.EXPIRED: WebhookEvent.EXPIRED,
    }
)


@dataclass(frozen=True, slots=True)
class Webhook:
    """Whom to tell of a job's end, by one signed POST that `inferq tasks` makes.

    - `url`: the receiver, http or https.
    - `events`: of which ends to tell (`job.completed`, `job.failed`, `job.cancelled`,
      `job.expired`); all by default.
    - `secret`: the name by which `inferq tasks` knows the secret that signs; never the secret.

    Raises `InvalidRequestError`.
    """

    url: str
    events: tuple[str, ...] = tuple(WebhookEvent)
    secret: str = DEFAULT_SECRET

    def __post_init__(self) -> None:
        _check_url(self.url)
        object.__setattr__(self, "events", _to_events(self.events))
        if not isinstance(self.secret, str) or not _SECRET_NAME.fullmatch(self.secret):
            raise InvalidRequestError(
                "must be the name of a secret: 1 to 64 letters, digits, '.', '_' or '-'",
                field="webhook.secret",
                limit=64,
            )

    def encode(self, trace: TraceContext | None = None) -> bytes:
        """Return it as it travels, with the trace of its job."""
        wire = {"u": self.url, "e": list(self.events), "s": self.secret}
        return pack({**wire, **trace_to_wire(trace)})

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Read what `encode` wrote; raise `DecodeError` for anything else."""
        wire = unpack(payload, MAX_WEBHOOK_BYTES)
        try:
            return cls(typed(wire, "u", str), typed(wire, "e", list), typed(wire, "s", str))
        except (LookupError, TypeError, InvalidRequestError) as error:
            raise DecodeError(f"webhook: {error}", payload) from None


def trace_of_hook(payload: bytes) -> TraceContext | None:
    """Return the trace of the job whose webhook travels as `payload`; raise `DecodeError`."""
    return trace_from_wire(unpack(payload, MAX_WEBHOOK_BYTES))


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """The end of a job with a webhook; `hook` is that as it travels."""

    entry_id: str
    job_id: str
    finish_reason: str
    time_ms: int
    hook: bytes

    @classmethod
    def from_fields(cls, entry_id: str, fields: Mapping[bytes, bytes]) -> Self:
        """Build from an entry of the outbox."""
        return cls(
            entry_id=entry_id,
            job_id=text(fields.get(b"id")),
            finish_reason=text(fields.get(b"finish")),
            time_ms=number(fields.get(b"time")),
            hook=fields.get(b"hook", b""),
        )


def _check_url(url: Any) -> None:
    if not isinstance(url, str):
        raise InvalidRequestError("must be text", field="webhook.url")
    if len(check_utf8("webhook.url", url)) > MAX_URL_BYTES:
        raise InvalidRequestError(
            f"is longer than {MAX_URL_BYTES} bytes", field="webhook.url", limit=MAX_URL_BYTES
        )
    if not url.isascii() or any(ord(c) <= 32 or ord(c) == 127 for c in url):
        raise InvalidRequestError("has characters that a URL must escape", field="webhook.url")
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_whole = is_whole and (parts.port is None or parts.port > 0)
    except ValueError:
        is_whole = False
    if not is_whole:
        raise InvalidRequestError("must be http://HOST… or https://HOST…", field="webhook.url")
    if "@" in parts.netloc:
        raise InvalidRequestError(
            "must hold no user and password: deliveries are signed instead", field="webhook.url"
        )
    if parts.fragment:
        raise InvalidRequestError("must have no #fragment", field="webhook.url")


def _to_events(events: Any) -> tuple[str, ...]:
    names = tuple(str(event) for event in WebhookEvent)
    if not isinstance(events, (tuple, list)) or not events:
        raise InvalidRequestError("must be a list of at least one", field="webhook.events")
    for event in events:
        if not isinstance(event, str) or event not in names:
            raise InvalidRequestError(
                f"{event!r} is not one of {', '.join(names)}", field="webhook.events"
            )
    return tuple(name for name in names if name in events)
