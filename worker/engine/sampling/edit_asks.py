"""Which requests want their logits edited."""

from __future__ import annotations

from inferq.protocol.params import SamplingParams


def asks_edits(params: SamplingParams) -> bool:
    """Whether logits are changed for a request, besides `min_tokens`."""
    return bool(params.allowed_token_ids or params.logit_bias or edits_follow_output(params))


def edits_follow_output(params: SamplingParams) -> bool:
    """Whether a step's edits depend on the tokens before it, which the host must know then."""
    return bool(params.structured_outputs or params.bad_words or asks_penalties(params))


def asks_penalties(params: SamplingParams) -> bool:
    """Whether tokens that stand in the text already are penalized."""
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (
        1.0,
        0.0,
        0.0,
    )
