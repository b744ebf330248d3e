"""Prompts of completions: text, token ids, or a list of either; each becomes a job."""

from __future__ import annotations

from typing import Any

from inferq.protocol.errors import InvalidRequestError

#: One prompt: text or token ids.
CompletionPrompt = str | list[int]

_FIELD = "prompt"


def completion_prompts(value: Any, *, most: int) -> list[CompletionPrompt]:
    """Return the prompts in a body's `prompt`, at most `most`; raise `InvalidRequestError`."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidRequestError("must be text, token ids, or a list of either", field=_FIELD)
    if not value:
        raise InvalidRequestError("is an empty list", field=_FIELD, limit=1)
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return [value]
    if kinds not in ({str}, {list}):
        raise InvalidRequestError(
            "a list holds either texts, or token ids, or lists of token ids: never a mixture",
            field=_FIELD,
        )
    if len(value) > most:
        raise InvalidRequestError(
            f"{len(value)} prompts are more than {most}", field=_FIELD, limit=most
        )
    for position, item in enumerate(value):
        if not item:
            raise InvalidRequestError("is empty", field=f"{_FIELD}[{position}]", limit=1)
        if isinstance(item, list) and not all(type(token_id) is int for token_id in item):
            raise InvalidRequestError("must be token ids alone", field=f"{_FIELD}[{position}]")
    return value
