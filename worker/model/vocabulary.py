"""How many token ids exist, read from the tokenizer's file."""

from __future__ import annotations

import json
from pathlib import Path

from inferq.protocol.errors import ModelError


def tokenizer_vocab_size(folder: Path) -> int | None:
    """Return the highest id of `folder`'s tokenizer.json plus one; None without that file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
        vocabulary = content["model"]["vocab"]
        # Unigram models list their pieces in the order of the ids.
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in content.get("added_tokens") or []]
        return int(max((*ids, *added))) + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a tokenizer file: {error!r}") from None
