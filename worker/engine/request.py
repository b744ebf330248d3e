"""From a job's prompt and parameters to what the engine takes, with every check on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.request_checks import check_request
from inferq.worker.engine.sequence import EngineRequest
from inferq.worker.engine.tokenizer import Tokenizer


def prepare_request(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    *,
    max_model_len: int,
    vocab_size: int,
    output_token_ids: Sequence[int] = (),
    priority: int = 0,
    arrival: float = 0.0,
    now: datetime | None = None,
) -> EngineRequest:
    """Return the request in token ids, its `max_tokens` cut to what the context leaves.

    `now` is the time that a chat template may mention: the same at every attempt, so that a job
    taken over keeps its prompt. Raises `InvalidRequestError`, naming field and limit, for what can
    never be served.
    """
    field, token_ids = _encode(prompt, tokenizer, now)
    room = max_model_len - len(token_ids)
    if room < 1:
        raise InvalidRequestError(
            f"{len(token_ids)} tokens leave no room for output in a context of {max_model_len} "
            "tokens",
            field=field,
            limit=max_model_len - 1,
        )
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(token_ids),
        params=params,
        output_token_ids=tuple(output_token_ids),
        priority=priority,
        arrival=arrival,
    )
    check_request(request, max_model_len=max_model_len, vocab_size=vocab_size)
    if params.max_tokens is None or params.max_tokens > room:
        request = replace(request, params=replace(params, max_tokens=room))
    return request


def _encode(
    prompt: Prompt, tokenizer: Tokenizer, now: datetime | None
) -> tuple[str, Sequence[int]]:
    """Return the token ids, and the name of the field that they come from."""
    match prompt:
        case TextPrompt(text):
            return "prompt", tokenizer.encode(text)
        case TokenPrompt(token_ids):
            return "prompt_token_ids", token_ids
        case ChatPrompt(messages):
            return "messages", tokenizer.render_chat(messages, now=now)
