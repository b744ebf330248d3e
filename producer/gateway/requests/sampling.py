"""From a request's body to sampling parameters, with errors in the words of the body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from inferq.producer.gateway.requests.forms import Form
from inferq.producer.gateway.requests.schemas import ChatBody, CompletionBody, GenerationBody
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.param_checks import check_optional_integer
from inferq.protocol.params import MAX_LOGPROBS, MAX_TOKENS_LIMIT, SamplingParams

#: OpenAI's `max_tokens` of a completion that gives none.
DEFAULT_COMPLETION_TOKENS: Final = 16

#: Fields whose name is that of the parameter; null means not given.
_SAME_NAME: Final = (
    "seed",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "length_penalty",
    "early_stopping",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def completion_params(body: CompletionBody, form: Form | None) -> SamplingParams:
    """Return the parameters of a completion; `form` is what the answer must have.

    Without tokens to generate (`max_tokens` 0, with `echo`) one is asked for, and to be dropped.
    Raises `InvalidRequestError` naming the body's field.
    """
    asked = body.max_tokens
    if asked == 0 and not body.echo:
        raise InvalidRequestError("0 goes with echo only", field="max_tokens", limit=1)
    check_optional_integer("max_tokens", asked, 0 if body.echo else 1, MAX_TOKENS_LIMIT)
    given = _common(body, form)
    given["max_tokens"] = DEFAULT_COMPLETION_TOKENS if asked is None else asked or 1
    if body.best_of is not None and not body.use_beam_search:
        given["best_of"] = body.best_of
    if body.use_beam_search:
        given["beam_width"] = body.best_of or body.n or 1
    if body.logprobs is not None:
        _check_shown("logprobs", body.logprobs)
        given["logprobs"] = body.logprobs
        if body.echo:
            given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    names = {"beam_width": _name_of_beams(body, "n" if body.best_of is None else "best_of")}
    return _make(given, names, form)


def chat_params(
    body: ChatBody, form: Form | None, *, default_max_tokens: int | None
) -> SamplingParams:
    """Return the parameters of a chat; `form` is what the answer must have.

    Raises `InvalidRequestError` naming the body's field.
    """
    given = _common(body, form)
    given["max_tokens"] = body.max_completion_tokens or body.max_tokens
    limit_name = "max_completion_tokens"
    if body.max_completion_tokens is None:
        limit_name = "max_tokens"
        if body.max_tokens is None:
            given["max_tokens"] = default_max_tokens
    elif body.max_tokens not in (None, body.max_completion_tokens):
        raise InvalidRequestError("contradicts max_completion_tokens", field="max_tokens")
    check_optional_integer(limit_name, getattr(body, limit_name), 1, MAX_TOKENS_LIMIT)
    if body.use_beam_search:
        given["beam_width"] = body.n or 1
    if body.logprobs:
        _check_shown("top_logprobs", body.top_logprobs)
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidRequestError("needs logprobs to be true", field="top_logprobs")
    names = {"beam_width": _name_of_beams(body, "n"), "max_tokens": limit_name}
    if body.top_logprobs is not None:
        names["logprobs"] = "top_logprobs"
    return _make(given, names, form)


def _common(body: GenerationBody, form: Form | None) -> dict[str, Any]:
    given = {name: v for name in _SAME_NAME if (v := getattr(body, name)) is not None}
    if form is not None:
        given["structured_outputs"] = form.outputs
    if body.n is not None:
        given["n"] = body.n
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    _check_shown("prompt_logprobs", body.prompt_logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequestError("does not go with stream", field="prompt_logprobs")
    if not body.use_beam_search:
        for field, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(body, field) not in (None, neutral):
                raise InvalidRequestError("needs use_beam_search", field=field)
    return given


def _name_of_beams(body: GenerationBody, counted_by: str) -> str:
    return counted_by if body.use_beam_search else "use_beam_search"


def _check_shown(field: str, number: int | None) -> None:
    """Refuse the whole vocabulary, which the SDK would give: an answer holds it for each token."""
    check_optional_integer(field, number, 0, MAX_LOGPROBS)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise InvalidRequestError(f"{key[:40]!r} is not a token id", field="logit_bias")
    return int(key)


def _make(given: Mapping[str, Any], names: Mapping[str, str], form: Form | None) -> SamplingParams:
    try:
        return SamplingParams(**given)
    except InvalidRequestError as error:
        if form is not None and error.field == "structured_outputs":
            raise error.of_field(form.field) from None
        raise _in_words_of_body(error, names) from None


def _in_words_of_body(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    field = names.get(error.field, error.field)
    message = error.reason
    for parameter, name in names.items():
        message = re.sub(rf"\b{parameter}\b", name, message)
    return InvalidRequestError(message, field=field, limit=error.limit, code=error.code)
