"""The frames between a worker's I/O side and its engine process; light, so that both can import it.

to the engine    [options]                              the first frame: the engine's settings
                 ["add", id, prompt ids, output ids, params, priority]
                 ["abort", [id, …]]
from the engine  ["ready", {num_blocks, block_size, max_model_len, vocab_size}]
                 ["failed", message, field]             the model cannot be served
                 ["steps", count, [[id, token ids, logprobs, finish reason, stop reason,
                  cached tokens, error], …], stats]     what some steps brought, merged by backlog
"""

from __future__ import annotations

from typing import Any

import msgpack

from inferq.protocol.errors import ErrorInfo
from inferq.protocol.messages import TokenLogprob


def pack(frame: list[Any]) -> bytes:
    """Encode one frame."""
    packed: bytes = msgpack.packb(frame, use_bin_type=True)
    return packed


def unpack(data: bytes) -> list[Any]:
    """Decode one frame; both ends of the pipe are ours."""
    frame: list[Any] = msgpack.unpackb(data, raw=False)
    return frame


def encode_logprobs(logprobs: tuple[TokenLogprob, ...] | None) -> list[Any] | None:
    """Return logprobs as they stand in a `steps` row."""
    return None if logprobs is None else [[lp.logprob, lp.top] for lp in logprobs]


def decode_logprobs(rows: list[Any] | None) -> tuple[TokenLogprob, ...] | None:
    """Rebuild the logprobs of a `steps` row."""
    if rows is None:
        return None
    return tuple(TokenLogprob(lp, tuple((i, p) for i, p in top)) for lp, top in rows)


def encode_error(error: ErrorInfo | None) -> list[str | None] | None:
    """Return an error as it stands in a `steps` row."""
    return None if error is None else [error.code, error.message, error.field, error.limit]


def decode_error(row: list[Any] | None) -> ErrorInfo | None:
    """Rebuild the error of a `steps` row."""
    return None if row is None else ErrorInfo(*row)
