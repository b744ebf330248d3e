"""A completion's body to jobs, one for each prompt."""

from __future__ import annotations

from typing import Any

from inferq.producer.gateway.answers.note import Kind, Note
from inferq.producer.gateway.requests.forms import FORM_FIELDS, requested_form
from inferq.producer.gateway.requests.prompts import completion_prompts
from inferq.producer.gateway.requests.sampling import completion_params
from inferq.producer.gateway.requests.schemas import CompletionBody
from inferq.producer.gateway.requests.submission import Asked
from inferq.producer.gateway.requests.terms import RequestTerms
from inferq.producer.gateway.requests.webhooks import requested_webhook


def ask_completion(body: CompletionBody, model: str, terms: RequestTerms) -> Asked:
    """Return what a body asks for; raise `InvalidRequestError`, naming the field."""
    form = requested_form({name: getattr(body, name) for name in FORM_FIELDS})
    params = completion_params(body, form)
    streamed = body.streamed()
    shows_prompt = bool(body.echo or body.return_token_ids)
    note = Note(
        kind=Kind.COMPLETION,
        model=model,
        n=params.n,
        budget=None if params.max_tokens is None else params.max_tokens * params.n,
        include_usage=streamed.include_usage,
        continuous_usage=streamed.continuous_usage_stats,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        echo=bool(body.echo),
        prompt_only=body.max_tokens == 0,
        form_field=None if form is None else form.field,
    )
    options_of_prompts: dict[str, Any] = {}
    if body.add_special_tokens is not None:
        options_of_prompts["add_special_tokens"] = body.add_special_tokens
    prompts = completion_prompts(body.prompt, most=terms.max_prompts)
    return Asked(
        note=note,
        params=params,
        prompts=[{"prompt": prompt, **options_of_prompts} for prompt in prompts],
        cache_salt=body.cache_salt,
        metadata=body.metadata,
        webhook=requested_webhook(body, terms),
        return_prompt_token_ids=shows_prompt or streamed.continuous_usage_stats,
    )
