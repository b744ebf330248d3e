"""The W3C trace context that travels in a job: who asked for it, in whoever's trace.

The forms are those of https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from inferq.protocol.errors import InvalidRequestError

#: Most bytes of a `tracestate`, and most members of it.
MAX_STATE_BYTES: Final = 512
MAX_STATE_MEMBERS: Final = 32

_PARENT: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<more>-[\x20-\x7e]{0,400})?"
)
_MEMBER: Final = re.compile(
    r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}")
_SAMPLED: Final = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A `traceparent` and perhaps a `tracestate`; raises `InvalidRequestError` for what is none."""

    traceparent: str
    tracestate: str | None = None

    def __post_init__(self) -> None:
        if not is_traceparent(self.traceparent):
            raise InvalidRequestError("is no traceparent", field="trace_context")
        if self.tracestate is not None and not is_tracestate(self.tracestate):
            raise InvalidRequestError(
                f"has a tracestate that is none of at most {MAX_STATE_BYTES} bytes",
                field="trace_context",
                limit=MAX_STATE_BYTES,
            )

    @classmethod
    def read(cls, traceparent: object, tracestate: object = None) -> Self | None:
        """Return what came from outside; None, and no error, for a parent that is malformed.

        A malformed state is left out: a trace is never a reason to refuse what is traced.
        """
        if not is_traceparent(traceparent):
            return None
        return cls(str(traceparent), str(tracestate) if is_tracestate(tracestate) else None)

    @classmethod
    def of_ids(
        cls, trace_id: int, span_id: int, *, is_sampled: bool, tracestate: str | None = None
    ) -> Self | None:
        """Return the context of a span; None if the ids are none."""
        flags = _SAMPLED if is_sampled else 0
        return cls.read(f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}", tracestate or None)

    @property
    def trace_id(self) -> str:
        """The trace, in 32 hexadecimal digits."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """The span that what follows is part of, in 16 hexadecimal digits."""
        return self.traceparent[36:52]

    @property
    def is_sampled(self) -> bool:
        """Whether the caller records the trace."""
        return bool(int(self.traceparent[53:55], 16) & _SAMPLED)


def trace_id_of(job_id: str) -> str | None:
    """Return the trace that a job begins which is in none: its id's own digits."""
    digits = job_id.partition("-")[0]
    return digits if _TRACE_ID.fullmatch(digits) and digits.strip("0") else None


def trace_to_wire(trace: TraceContext | None) -> dict[str, str]:
    """Return what a message has of a trace: `tp` the parent, `ts` the state."""
    if trace is None:
        return {}
    state = {} if trace.tracestate is None else {"ts": trace.tracestate}
    return {"tp": trace.traceparent, **state}


def trace_from_wire(wire: Mapping[str, object]) -> TraceContext | None:
    """Return what a message says of its trace, if that is well-formed."""
    return TraceContext.read(wire.get("tp"), wire.get("ts"))


def is_traceparent(value: object) -> bool:
    """Whether a value is a `traceparent`, of this version or a later one."""
    if not isinstance(value, str) or not (match := _PARENT.fullmatch(value)):
        return False
    version, more = match["version"], match["more"]
    is_known = version != "ff" and not (version == "00" and more)
    return is_known and any(c != "0" for c in match["trace"]) and match["span"] != "0" * 16


def is_tracestate(value: object) -> bool:
    """Whether a value is a `tracestate` of a size that travels."""
    if not isinstance(value, str) or not value or len(value) > MAX_STATE_BYTES:
        return False
    members = [member.strip(" \t") for member in value.split(",")]
    filled = [member for member in members if member]
    keys = {member.partition("=")[0] for member in filled}
    return (
        0 < len(members) <= MAX_STATE_MEMBERS
        and len(keys) == len(filled) > 0
        and all(_MEMBER.fullmatch(member) for member in filled)
    )
