"""An ended job becomes a delivery: what its receiver is told."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from inferq.producer.tasks.deliveries import NewDelivery
from inferq.protocol.errors import DecodeError
from inferq.protocol.messages import Event, FinishReason
from inferq.protocol.webhooks import EVENT_OF, OutboxEntry, Webhook, trace_of_hook


def delivery_id_of(job_id: str) -> str:
    """Return the id of a job's delivery: the same at every try, as a job ends once."""
    return f"msg_{job_id}"


def to_delivery(entry: OutboxEntry, last: Event | None, *, queue: str) -> NewDelivery | None:
    """Return what to deliver; None if the job's webhook does not ask for this event.

    `last` is the job's last event, where it could be read. Raises `DecodeError` for an entry that
    nobody can read.
    """
    webhook = Webhook.decode(entry.hook)
    if entry.finish_reason not in set(FinishReason):
        raise DecodeError(f"{entry.finish_reason!r} is no finish reason", entry.hook)
    event = EVENT_OF[FinishReason(entry.finish_reason)]
    if event not in webhook.events:
        return None
    try:
        ended = datetime.fromtimestamp(entry.time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        raise DecodeError(f"{entry.time_ms} is no time", entry.hook) from None
    told = {
        "type": event.value,
        "timestamp": ended.replace("+00:00", "Z"),
        "data": {
            "job_id": entry.job_id,
            "queue": queue,
            "finish_reason": entry.finish_reason,
            **_terminal_of(last),
        },
    }
    return NewDelivery(
        delivery_id=delivery_id_of(entry.job_id),
        job_id=entry.job_id,
        event=event.value,
        url=webhook.url,
        secret=webhook.secret,
        body=json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode(),
        trace=trace_of_hook(entry.hook),
    )


def _terminal_of(last: Event | None) -> dict[str, Any]:
    """Return usage and error; null where the events of the job were gone."""
    terminal = None if last is None else last.terminal
    if terminal is None:
        return {"usage": None, "error": None}
    usage, error = terminal.usage, terminal.error
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
        },
        "error": None if error is None else {"code": error.code, "message": error.message},
    }
