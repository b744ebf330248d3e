"""The frames between a worker's I/O side and its engine process; light, so that both can import it.

to the engine    [options]                              the first frame: the engine's settings
                 ["add", id, prompt ids, [[output ids, ended], …] (resumed), params, priority,
                  cache salt, adapter, whether it is traced]
                 ["abort", [[id, output index or None for all], …]]
                 ["blocks"]                             what do the blocks hold?
from the engine  ["ready", {num_blocks, block_size, max_model_len, vocab_size}]
                 ["failed", message, field]             the model cannot be served
                 ["steps", count, [row, …], stats, [[seconds, tokens, sequences], …]]
                  what some steps brought, merged by backlog; the last has each of these steps
                 ["events", [[id, output index, kind, time in s since 1970], …]]
                                                        of traced requests; see `RequestEvent`
                 ["blocks", seconds, snapshot]          that, as it goes to the queue, and how long
                  it took to find
row              [id, index, token ids, logprobs, cumulative logprobs, finish reason, stop reason,
                  cached tokens, error, prompt logprobs, request finished]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgpack

from inferq.protocol.errors import ErrorInfo
from inferq.protocol.messages import FinishReason, TokenLogprob
from inferq.worker.engine.requests.request_events import EventKind, RequestEvent
from inferq.worker.pipe.engine_output import EngineOutput


def pack(frame: list[Any]) -> bytes:
    """Encode one frame."""
    packed: bytes = msgpack.packb(frame, use_bin_type=True)
    return packed


def unpack(data: bytes) -> list[Any]:
    """Decode one frame; both ends of the pipe are ours."""
    frame: list[Any] = msgpack.unpackb(data, raw=False)
    return frame


def encode_output(output: EngineOutput) -> list[Any]:
    """Return an output as a row of a `steps` frame."""
    error = output.error
    return [
        output.request_id,
        output.index,
        output.token_ids,
        _encode_logprobs(output.logprobs),
        output.cumulative_logprobs,
        None if output.finish_reason is None else output.finish_reason.value,
        output.stop_reason,
        output.num_cached_tokens,
        None if error is None else [error.code, error.message, error.field, error.limit],
        _encode_logprobs(output.prompt_logprobs),
        output.request_finished,
    ]


def decode_output(row: list[Any]) -> EngineOutput:
    """Rebuild an output of a `steps` frame."""
    (
        request_id, index, token_ids, logprobs, totals, finish, stop_reason, cached, error, prompt,
        request_finished,
    ) = row  # fmt: skip
    return EngineOutput(
        request_id=request_id,
        index=index,
        token_ids=tuple(token_ids),
        logprobs=None if logprobs is None else tuple(_decode_logprob(lp) for lp in logprobs),
        cumulative_logprobs=None if totals is None else tuple(totals),
        finish_reason=None if finish is None else FinishReason(finish),
        stop_reason=stop_reason,
        num_cached_tokens=cached,
        error=None if error is None else ErrorInfo(*error),
        prompt_logprobs=None
        if prompt is None
        else tuple(None if lp is None else _decode_logprob(lp) for lp in prompt),
        request_finished=request_finished,
    )


def encode_events(events: Iterable[RequestEvent]) -> list[Any]:
    """Return events as rows of an `events` frame."""
    return [[event.request_id, event.index, event.kind.value, event.at] for event in events]


def decode_events(rows: list[list[Any]]) -> list[RequestEvent]:
    """Rebuild the events of an `events` frame."""
    return [
        RequestEvent(request_id, index, EventKind(kind), at) for request_id, index, kind, at in rows
    ]


def _encode_logprobs(logprobs: Iterable[TokenLogprob | None] | None) -> list[Any] | None:
    if logprobs is None:
        return None
    return [None if lp is None else [lp.logprob, lp.top] for lp in logprobs]


def _decode_logprob(row: list[Any]) -> TokenLogprob:
    logprob, top = row
    return TokenLogprob(logprob, tuple((token_id, value) for token_id, value in top))
