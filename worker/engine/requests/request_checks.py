"""What a request must satisfy before it may wait."""

from __future__ import annotations

import math
from collections.abc import Sequence

from inferq.protocol.errors import ErrorCode, InvalidRequestError
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.engine.requests.token_parameters import (
    check_in_vocabulary,
    check_token_parameters,
)


def check_request(
    request: EngineRequest,
    *,
    max_model_len: int,
    vocab_size: int,
    max_num_seqs: int | None = None,
) -> None:
    """Raise `InvalidRequestError`, naming field and limit, for what can never be served.

    `max_num_seqs` is None where the engine, which checks again, is not at hand.
    """
    prompt, params = request.prompt_token_ids, request.params
    if not prompt:
        raise InvalidRequestError("is empty", field="prompt_token_ids", limit=1)
    room = room_for_output(prompt, max_model_len, field="prompt_token_ids")
    if params.min_tokens > room:
        raise InvalidRequestError(
            f"{params.min_tokens} is more than the {room} tokens that a prompt of {len(prompt)} "
            f"leaves of a context of {max_model_len}",
            field="min_tokens",
            limit=room,
        )
    if params.seed is None:
        raise InvalidRequestError("must be set before a request reaches the engine", field="seed")
    if not math.isfinite(request.arrival):
        raise InvalidRequestError(f"{request.arrival} is not a time", field="arrival")
    _check_outputs(request, max_num_seqs)
    check_in_vocabulary("prompt_token_ids", prompt, vocab_size)
    for output in request.resumed:
        check_in_vocabulary("resumed", output.token_ids, vocab_size)
    check_token_parameters(params, vocab_size)


def room_for_output(prompt: Sequence[int], max_model_len: int, *, field: str) -> int:
    """Return how many tokens a prompt leaves of the context, at least one.

    Raises `InvalidRequestError`, naming `field`, where there is none.
    """
    room = max_model_len - len(prompt)
    if room < 1:
        raise InvalidRequestError(
            f"{len(prompt)} tokens leave no room for output in a context of {max_model_len} tokens",
            field=field,
            limit=max_model_len - 1,
            code=ErrorCode.CONTEXT_LENGTH,
        )
    return room


def _check_outputs(request: EngineRequest, max_num_seqs: int | None) -> None:
    params = request.params
    if max_num_seqs is not None and params.num_candidates > max_num_seqs:
        field = "beam_width" if params.beam_width else "best_of" if params.best_of else "n"
        raise InvalidRequestError(
            f"{params.num_candidates} sequences are more than the {max_num_seqs} that run at once",
            field=field,
            limit=max_num_seqs,
        )
    most = 0 if params.publishes_at_end else params.num_candidates
    if len(request.resumed) > most:
        raise InvalidRequestError(
            f"{len(request.resumed)} outputs, but this request can resume {most}",
            field="resumed",
            limit=most,
        )
