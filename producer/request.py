"""What a producer's arguments become: a checked job, its cost bound and its place in the queue."""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from inferq.producer.prompt import prompt_token_bound
from inferq.protocol.digest import content_digest
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import Lane, new_job_id
from inferq.protocol.messages import Job, Prompt, Task
from inferq.protocol.param_checks import check_utf8
from inferq.protocol.params import SamplingParams
from inferq.protocol.scripts import MAX_KEY_BYTES, MAX_NOTE_BYTES, MAX_RETENTION_MS
from inferq.protocol.trace_context import TraceContext
from inferq.protocol.webhooks import Webhook

#: Longest deadline or delay, in seconds (30 days).
MAX_DELAY_S: Final = 30 * 24 * 3600.0


def make_job(
    prompt: Prompt,
    params: SamplingParams | None,
    *,
    model: str | None = None,
    metadata: Mapping[str, str] | None = None,
    cache_salt: str | None = None,
    partition: int = 0,
    task: Task = Task.GENERATE,
    return_prompt_token_ids: bool = False,
    trace: TraceContext | None = None,
) -> tuple[Job, str]:
    """Return a job with an id of its own, and a seed if `params` has none; and its digest.

    The digest is of what was asked for: not of the id, the time, the cache salt, the trace, or a
    seed that was drawn.
    """
    if params is None:
        params = SamplingParams()
    elif not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"must be SamplingParams, not {type(params).__name__}", field="params"
        )
    if not isinstance(metadata, Mapping | None):
        raise InvalidRequestError("must be a map of text to text", field="metadata")
    job = Job(
        id=new_job_id(partition),
        prompt=prompt,
        params=params,
        model=model,
        metadata={} if metadata is None else metadata,
        created_ms=time.time_ns() // 1_000_000,
        cache_salt=cache_salt,
        task=task,
        return_prompt_token_ids=return_prompt_token_ids,
        trace=trace,
    )
    digest = content_digest(
        job.prompt,
        params,
        job.model,
        job.metadata,
        task=task,
        return_prompt_token_ids=return_prompt_token_ids,
    )
    if params.seed is None and task is Task.GENERATE:
        seeded = dataclasses.replace(params, seed=secrets.randbits(63))
        job = dataclasses.replace(job, params=seeded)
    return job, digest


def cost_bounds(job: Job) -> tuple[int, int | None]:
    """Return how many tokens the job's prompt, and all its candidates, can be at most.

    The prompt's is exact for token ids; the candidates' is None without `max_tokens`. A job that is
    not for the engine takes no room in it.
    """
    if job.task is not Task.GENERATE:
        return 0, 0
    params = job.params
    prompt_tokens = prompt_token_bound(job.prompt)
    if params.truncate_prompt_tokens is not None and params.truncate_prompt_tokens > 0:
        prompt_tokens = min(prompt_tokens, params.truncate_prompt_tokens)
    budget = None if params.max_tokens is None else params.max_tokens * params.num_candidates
    return prompt_tokens, budget


def to_lane(lane: str) -> Lane:
    """Return the lane of that name."""
    try:
        return Lane(lane)
    except ValueError:
        names = ", ".join(repr(known.value) for known in Lane)
        raise InvalidRequestError(
            f"{lane!r} is not one of {names}", field="lane", limit=names
        ) from None


def to_schedule(
    deadline_s: float | None, not_before: datetime | None, delay_s: float | None
) -> tuple[int | None, int]:
    """Return deadline and delay in milliseconds from now, the one after the other."""
    delay_ms = to_delay_ms(not_before, delay_s)
    if deadline_s is None:
        return None, delay_ms
    deadline_ms = max(1, _milliseconds("deadline_s", deadline_s, may_be_zero=False))
    if deadline_ms <= delay_ms:
        raise InvalidRequestError(
            f"{deadline_s:.15g} s from now is before the job may start",
            field="deadline_s",
            limit=delay_ms / 1000,
        )
    return deadline_ms, delay_ms


def to_delay_ms(not_before: datetime | None, delay_s: float | None) -> int:
    """Return how many milliseconds from now (by this machine's clock) the job may start."""
    if not_before is None:
        return 0 if delay_s is None else _milliseconds("delay_s", delay_s, may_be_zero=True)
    if delay_s is not None:
        raise InvalidRequestError("goes not together with delay_s", field="not_before")
    if not isinstance(not_before, datetime) or not_before.utcoffset() is None:
        raise InvalidRequestError("must be a datetime with a time zone", field="not_before")
    delay_s = max(0.0, (not_before - datetime.now(UTC)).total_seconds())
    return _milliseconds("not_before", delay_s, may_be_zero=True)


def check_idempotency_key(key: str | None) -> None:
    """Raise `InvalidRequestError` unless the key is absent or text of 1 to 256 bytes."""
    if key is None:
        return
    if not isinstance(key, str) or not key:
        raise InvalidRequestError("must be text that is not empty", field="idempotency_key")
    if len(check_utf8("idempotency_key", key)) > MAX_KEY_BYTES:
        raise InvalidRequestError(
            f"is longer than {MAX_KEY_BYTES} bytes",
            field="idempotency_key",
            limit=MAX_KEY_BYTES,
        )


def check_note(note: bytes | None) -> None:
    """Raise `InvalidRequestError` unless the note is absent, or 1 to 4,096 bytes."""
    if note is None:
        return
    if not isinstance(note, bytes):
        raise InvalidRequestError(f"must be bytes, not {type(note).__name__}", field="note")
    if not note:
        raise InvalidRequestError("is empty: leave it out", field="note", limit=1)
    if len(note) > MAX_NOTE_BYTES:
        raise InvalidRequestError(
            f"{len(note)} bytes are more than {MAX_NOTE_BYTES}", field="note", limit=MAX_NOTE_BYTES
        )


def check_webhook(webhook: object) -> None:
    """Raise `InvalidRequestError` for what is neither a webhook nor absent."""
    if not isinstance(webhook, Webhook | None):
        raise InvalidRequestError(
            f"must be a Webhook, not {type(webhook).__name__}", field="webhook"
        )


def check_trace_context(trace: object) -> None:
    """Raise `InvalidRequestError` for what is neither a trace context nor absent."""
    if not isinstance(trace, TraceContext | None):
        raise InvalidRequestError(
            f"must be a TraceContext, not {type(trace).__name__}", field="trace_context"
        )


def check_seconds(field: str, value: object) -> float:
    """Return a time-out in seconds, which must be a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequestError(f"must be a number of seconds, not {value!r}", field=field)
    if value <= 0:
        raise InvalidRequestError(f"{value} is not above 0", field=field, limit=0)
    return float(value)


def to_retention_ms(retention_s: float) -> int:
    """Return a retention in milliseconds: at least one, and no longer than the scripts allow."""
    longest_s = MAX_RETENTION_MS / 1000
    if not 0.001 <= check_seconds("retention_s", retention_s) <= longest_s:
        raise InvalidRequestError(
            f"{retention_s:.15g} s is not in [0.001, {longest_s:.0f}] s",
            field="retention_s",
            limit=f"[0.001, {longest_s:.0f}]",
        )
    return int(retention_s * 1000)


def _milliseconds(field: str, seconds: float, *, may_be_zero: bool) -> int:
    if not (may_be_zero and seconds == 0 and not isinstance(seconds, bool)):
        check_seconds(field, seconds)
    if seconds > MAX_DELAY_S:
        raise InvalidRequestError(
            f"{seconds:.15g} s are more than {MAX_DELAY_S:.15g}", field=field, limit=MAX_DELAY_S
        )
    return int(seconds * 1000)
