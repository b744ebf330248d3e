"""A chat's body to a job."""

from __future__ import annotations

from typing import Any

from inferq.producer.gateway.answers.note import Kind, Note
from inferq.producer.gateway.requests.conversation import conversation
from inferq.producer.gateway.requests.forms import FORM_FIELDS, requested_form
from inferq.producer.gateway.requests.sampling import chat_params
from inferq.producer.gateway.requests.schemas import ChatBody, TokenizeBody
from inferq.producer.gateway.requests.submission import Asked
from inferq.producer.gateway.requests.terms import RequestTerms
from inferq.producer.gateway.requests.webhooks import requested_webhook
from inferq.producer.gateway.tools.offered_tools import plan


def ask_chat(body: ChatBody, model: str, terms: RequestTerms) -> Asked:
    """Return what a body asks for; raise `InvalidRequestError`, naming the field."""
    planned = plan(
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        form=requested_form({name: getattr(body, name) for name in FORM_FIELDS}),
        tool_format=terms.tool_format,
    )
    form = planned.form
    params = chat_params(body, form, default_max_tokens=terms.default_max_tokens)
    streamed = body.streamed()
    note = Note(
        kind=Kind.CHAT,
        model=model,
        n=params.n,
        budget=None if params.max_tokens is None else params.max_tokens * params.n,
        include_usage=streamed.include_usage,
        continuous_usage=streamed.continuous_usage_stats,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        form_field=None if form is None else form.field,
        tools=planned.to_note(),
    )
    prompt = chat_prompt(body)
    if planned.tools:
        prompt["tools"] = planned.tools
    return Asked(
        note=note,
        params=params,
        prompts=[prompt],
        cache_salt=body.cache_salt,
        metadata=body.metadata,
        webhook=requested_webhook(body, terms),
        return_prompt_token_ids=bool(body.return_token_ids) or streamed.continuous_usage_stats,
    )


def chat_prompt(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Return the conversation, without tools, as arguments of `AsyncClient.submit`."""
    prompt: dict[str, Any] = {"messages": conversation(body.messages)}
    for name in ("chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
        value = getattr(body, name)
        if value is not None:
            prompt[name] = value
    if body.continue_final_message and body.add_generation_prompt is None:
        prompt["add_generation_prompt"] = False
    return prompt
