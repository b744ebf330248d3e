"""The digest that tells whether two submissions ask for the same thing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgpack

from inferq.protocol.messages import ChatPrompt, Prompt, TextPrompt
from inferq.protocol.params import SamplingParams


def content_digest(
    prompt: Prompt, params: SamplingParams, model: str | None, metadata: Mapping[str, str]
) -> str:
    """Return 64 hexadecimal digits over what is asked for, not over its id or time.

    Give the parameters as the user gave them: a seed that was drawn for them would count.
    """
    match prompt:
        case TextPrompt(text):
            content: object = text
        case ChatPrompt(messages):
            content = [[m.role, m.content] for m in messages]
        case _:
            content = prompt.token_ids
    form = [
        type(prompt).__name__,
        content,
        sorted(params.to_wire().items()),
        model,
        sorted(metadata.items()),
    ]
    return hashlib.sha256(msgpack.packb(form)).hexdigest()
