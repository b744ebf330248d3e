"""A tokenizer as llguidance must see it: tokens that are text, among the ordinary ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any


def with_text_tokens(tokenizer_json: str, end_token_ids: Set[int]) -> str:
    """Return tokenizer.json with its added tokens that are text in the model's own vocabulary.

    llguidance takes every added token like `<tool_call>` for a special one, which no text has, even
    where it is not: a model that writes such tokens could not, and one that had to would fail.
    """
    tokenizer = json.loads(tokenizer_json)
    added = sorted(tokenizer.get("added_tokens") or [], key=lambda token: int(token["id"]))
    kept = [t for t in added if t["id"] in end_token_ids or not _is_text(t)]
    # All of them: the others would be given new ids, counted from the vocabulary's end.
    if len(kept) == len(added) or not _add(tokenizer["model"]["vocab"], added):
        return tokenizer_json
    return json.dumps({**tokenizer, "added_tokens": kept}, ensure_ascii=False)


def _is_text(token: Mapping[str, Any]) -> bool:
    """Whether llguidance would misjudge a token that can be an ordinary one."""
    content = token["content"]
    looks_special = content.startswith("<") and content.endswith(">")
    looks_like_a_byte = content.startswith("<0x")
    # Vocabularies of bytes, and those of pieces, write only these characters as they are.
    is_plain = all("!" <= character <= "~" for character in content)
    return looks_special and is_plain and not looks_like_a_byte and not token.get("special")


def _add(vocabulary: Any, tokens: Sequence[Mapping[str, Any]]) -> bool:
    """Put tokens into a vocabulary; return whether each now has its id there."""
    if isinstance(vocabulary, dict):
        return all(vocabulary.setdefault(t["content"], t["id"]) == t["id"] for t in tokens)
    for token in tokens:
        if token["id"] == len(vocabulary):
            vocabulary.append([token["content"], 0.0])
    return all(t["id"] < len(vocabulary) and vocabulary[t["id"]][0] == t["content"] for t in tokens)
