"""From a job's prompt and parameters to what the engine takes, with every check on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from inferq.protocol.params import SamplingParams
from inferq.protocol.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from inferq.worker.engine.requests.request_checks import check_request, room_for_output
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.engine.sampling.structured_output import check_structured_outputs
from inferq.worker.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A prompt in token ids, and parameters whose `max_tokens` is set and fits the context."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams

    @property
    def max_tokens(self) -> int:
        """Most tokens that can be generated."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens


def prepare_request(
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    *,
    max_model_len: int,
    vocab_size: int,
    now: datetime | None = None,
) -> PreparedRequest:
    """Tokenize a prompt, apply the model's defaults, cut `max_tokens` to what the context leaves.

    `now` is the time that a chat template may mention: the same at every attempt, so that a job
    taken over keeps its prompt. Raises `InvalidRequestError`, naming field and limit, for what can
    never be served.
    """
    params = tokenizer.sampling_defaults.apply(params)
    field, token_ids = encode_prompt(prompt, tokenizer, now=now)
    token_ids = _truncated(token_ids, params, max_model_len)
    room = room_for_output(token_ids, max_model_len, field=field)
    _check(token_ids, params, max_model_len=max_model_len, vocab_size=vocab_size)
    if params.max_tokens is None or params.max_tokens > room:
        params = replace(params, max_tokens=room)
    return PreparedRequest(token_ids, params)


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, *, now: datetime | None = None
) -> tuple[str, tuple[int, ...]]:
    """Return the name of the field that a prompt came in, and its token ids.

    `now` is the time that a chat template may mention.
    """
    match prompt:
        case TextPrompt(text, special):
            return "prompt", tuple(tokenizer.encode(text, add_special_tokens=special))
        case TokenPrompt(token_ids):
            return "prompt_token_ids", token_ids
        case ChatPrompt():
            ids = tokenizer.render_chat(
                prompt.messages,
                tools=prompt.tools,
                names=prompt.template_kwargs,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                now=now,
            )
            return "messages", tuple(ids)


def _truncated(
    token_ids: tuple[int, ...], params: SamplingParams, max_model_len: int
) -> tuple[int, ...]:
    """Return the end of a prompt that `truncate_prompt_tokens` keeps.

    -1 keeps what the context holds beside the output: beside `max_tokens` where the context is
    longer than that, else beside one token; `min_tokens` always have their place.
    """
    keep = params.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        wanted = params.max_tokens or 1
        room = max(wanted if wanted < max_model_len else 1, params.min_tokens)
        keep = max(max_model_len - room, 1)
    return token_ids[-keep:]


def _check(
    token_ids: Sequence[int], params: SamplingParams, *, max_model_len: int, vocab_size: int
) -> None:
    """Apply the checks of engine and sampler, before the request takes a place in the engine."""
    seeded = params if params.seed is not None else replace(params, seed=0)
    request = EngineRequest(request_id="", prompt_token_ids=tuple(token_ids), params=seeded)
    check_request(request, max_model_len=max_model_len, vocab_size=vocab_size)
    check_structured_outputs(params)
