"""What of a request can be too large for an event: log-probabilities, and the texts of tokens."""

from __future__ import annotations

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.messages import MAX_EVENT_BYTES
from inferq.protocol.output_log import (
    EVENT_MARGIN,
    LOGPROB_BYTES,
    TOKEN_ID_BYTES,
    TOKEN_TEXT_BYTES,
)
from inferq.worker.engine.requests.request import PreparedRequest
from inferq.worker.engine.text.tokenizer import Tokenizer


def check_event_size(prepared: PreparedRequest, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse log-probabilities that no event could hold, together with the texts of their tokens.

    Those of one token travel in one event, those of the prompt in the first.
    """
    params = prepared.params
    if params.prompt_logprobs is None and params.logprobs != -1:
        return
    room = MAX_EVENT_BYTES - EVENT_MARGIN
    room -= vocab_size * TOKEN_TEXT_BYTES + tokenizer.total_token_bytes
    if params.logprobs is not None:
        room -= LOGPROB_BYTES * _logprobs_each(params.logprobs, vocab_size)
    if room < 0 and params.logprobs == -1:
        raise InvalidRequestError(
            f"those of a vocabulary of {vocab_size} tokens are more than one event holds",
            field="logprobs",
            limit=MAX_EVENT_BYTES,
        )
    if params.prompt_logprobs is None:
        return
    each = _logprobs_each(params.prompt_logprobs, vocab_size)
    most = max(room, 0) // (LOGPROB_BYTES * each + TOKEN_ID_BYTES)
    if len(prepared.prompt_token_ids) > most:
        raise InvalidRequestError(
            f"{each} log-probabilities for each of {len(prepared.prompt_token_ids)} prompt tokens "
            f"are more than one event holds; a prompt of {most} tokens may ask for so many",
            field="prompt_logprobs",
            limit=most,
        )


def _logprobs_each(wanted: int, vocab_size: int) -> int:
    return 1 + (vocab_size if wanted == -1 else wanted)
