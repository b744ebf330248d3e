"""Webhooks that requests ask for."""

from __future__ import annotations

from dataclasses import replace

from inferq.producer.gateway.requests.schemas import GenerationBody
from inferq.producer.gateway.requests.terms import RequestTerms
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.webhooks import DEFAULT_SECRET, Webhook, WebhookEvent


def requested_webhook(body: GenerationBody, terms: RequestTerms) -> Webhook | None:
    """Return whom to tell of the end of each job; raise `InvalidRequestError`, naming the field."""
    asked = body.webhook
    if asked is None:
        return None
    if not terms.accept_webhooks:
        raise InvalidRequestError(
            "is not delivered here: that takes a gateway with the setting --accept-webhooks "
            "(INFERQ_GATEWAY_ACCEPT_WEBHOOKS)",
            field="webhook",
        )
    return Webhook(asked.url, tuple(WebhookEvent) if asked.events is None else tuple(asked.events))


def signed_for(webhook: Webhook | None, key_id: str) -> Webhook | None:
    """Return a webhook that the secret of an API key's name signs.

    So nobody can have a message signed as another key's.
    """
    return None if webhook is None else replace(webhook, secret=key_id or DEFAULT_SECRET)
