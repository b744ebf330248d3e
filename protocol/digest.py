"""The digest that tells whether two submissions ask for the same thing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgpack

from inferq.protocol.messages import Task
from inferq.protocol.params import SamplingParams
from inferq.protocol.prompts import ChatPrompt, Prompt, encode_prompt


def content_digest(
    prompt: Prompt,
    params: SamplingParams,
    model: str | None,
    metadata: Mapping[str, str],
    *,
    task: Task = Task.GENERATE,
    return_prompt_token_ids: bool = False,
) -> str:
    """Return 64 hexadecimal digits over what is asked for, not over its id or time.

    Give the parameters as the user gave them: a seed that was drawn for them would count.
    """
    form = [
        type(prompt).__name__,
        _content(prompt),
        sorted(params.to_wire().items()),
        model,
        sorted(metadata.items()),
    ]
    # Only where they are asked for: a job of an earlier release keeps its digest.
    if task is not Task.GENERATE:
        form.append(["task", task.value])
    if return_prompt_token_ids:
        form.append(["return_prompt_token_ids"])
    return hashlib.sha256(msgpack.packb(form)).hexdigest()


def _content(prompt: Prompt) -> object:
    """Return the prompt's share of a message, in its order: a template may show the order."""
    wire = encode_prompt(prompt)
    content = wire.pop("m" if isinstance(prompt, ChatPrompt) else "p")
    return [content, list(wire.items())] if wire else content
