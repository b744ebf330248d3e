"""How a request's jobs are delivered: lane, deadline, idempotency, and what a disconnect means."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from inferq.producer.gateway.admission.access import Access
from inferq.producer.gateway.requests.schemas import GenerationBody
from inferq.producer.request import MAX_DELAY_S
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import Lane
from inferq.protocol.scripts import MAX_KEY_BYTES

IDEMPOTENCY_HEADER: Final = "Idempotency-Key"
REQUEST_ID_HEADER: Final = "X-Request-Id"
#: `request-id` makes the request's id an idempotency key.
IDEMPOTENCY_MODE_HEADER: Final = "X-Inferq-Idempotency"
DEADLINE_HEADER: Final = "X-Inferq-Deadline"
CANCEL_HEADER: Final = "X-Inferq-Cancel-On-Disconnect"

_TIERS: Final = {"auto": None, "default": Lane.NORMAL, "priority": Lane.HIGH, "flex": Lane.LOW}
_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Delivery:
    """What the headers and the body ask for besides the answer itself.

    `key` is as the client wrote it; `scope` tells whose it is.
    """

    lane: Lane
    deadline_s: float | None
    key: str | None
    scope: str
    cancel_on_disconnect: bool

    @classmethod
    def of(cls, headers: Mapping[str, str], body: GenerationBody, access: Access) -> Self:
        """Read them; raise `InvalidRequestError`, or a 403 for a lane that is not the key's."""
        lane = requested_lane(body) or Lane.NORMAL
        param = "service_tier" if body.priority is None else "priority"
        access.check_lane(lane, param=param)
        return cls(
            lane=lane,
            deadline_s=_deadline(headers.get(DEADLINE_HEADER)),
            key=requested_key(headers),
            scope=access.key_id or "",
            cancel_on_disconnect=_cancels(headers.get(CANCEL_HEADER), body),
        )

    def job_key(self, position: int) -> str | None:
        """Return the idempotency key of the job at a position: of fixed length, and per API key."""
        if self.key is None:
            return None
        # a header has no line breaks, so that no two keys look alike
        parts = f"{self.scope}\n{self.key}\n{position}"
        return hashlib.sha256(parts.encode()).hexdigest()


def requested_lane(body: GenerationBody) -> Lane | None:
    """Return the lane that a body asks for, if any; raise `InvalidRequestError`."""
    tier = None if body.service_tier is None else _TIERS[body.service_tier]
    if body.priority is None:
        return tier
    lane = Lane.NORMAL
    if body.priority != 0:
        lane = Lane.HIGH if body.priority < 0 else Lane.LOW
    if tier not in (None, lane):
        raise InvalidRequestError(
            f"{body.priority} contradicts service_tier {body.service_tier!r}", field="priority"
        )
    return lane


def _deadline(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_DELAY_S:
        raise InvalidRequestError(
            f"{text[:40]!r} is not a number of seconds above 0 and up to {MAX_DELAY_S:.0f}",
            field=DEADLINE_HEADER,
            limit=MAX_DELAY_S,
        )
    return seconds


def requested_key(headers: Mapping[str, str]) -> str | None:
    """Return the idempotency key that headers name, if any; raise `InvalidRequestError`."""
    key, field = headers.get(IDEMPOTENCY_HEADER), IDEMPOTENCY_HEADER
    mode = headers.get(IDEMPOTENCY_MODE_HEADER)
    if mode is not None and mode != "request-id":
        raise InvalidRequestError(f"{mode[:40]!r} is not request-id", field=IDEMPOTENCY_MODE_HEADER)
    if key is None and mode is not None:
        key, field = headers.get(REQUEST_ID_HEADER), REQUEST_ID_HEADER
        if key is None:
            raise InvalidRequestError("is missing", field=REQUEST_ID_HEADER)
    if key is not None and not 1 <= len(key.encode()) <= MAX_KEY_BYTES:
        raise InvalidRequestError(
            f"must have 1 to {MAX_KEY_BYTES} bytes", field=field, limit=MAX_KEY_BYTES
        )
    return key


def _cancels(text: str | None, body: GenerationBody) -> bool:
    if text is None:
        return bool(body.cancel_on_disconnect)
    flag = _FLAGS.get(text.strip().lower())
    if flag is None:
        raise InvalidRequestError("must be true or false", field=CANCEL_HEADER)
    if body.cancel_on_disconnect not in (None, flag):
        raise InvalidRequestError(f"contradicts {CANCEL_HEADER}", field="cancel_on_disconnect")
    return flag
