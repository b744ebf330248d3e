"""A model's tokens as its tokenizer.json tells them: how many, and how texts are spelled."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from inferq.protocol.errors import ModelError


class ModelVocabulary:
    """The tokenizer of a model folder, read when it is first needed.

    Raises `ModelError` where there is none, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a piece of text, without special tokens around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def tokenizer_json(self) -> str:
        """Return the tokenizer's file."""
        if not self._file.is_file():
            raise ModelError(f"{self._file.parent} has no tokenizer.json")
        return self._file.read_text(encoding="utf-8")

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(self.tokenizer_json())
        except ModelError:
            raise
        except Exception as error:  # noqa: BLE001 - the Rust side raises bare exceptions
            raise ModelError(f"{self._file} is damaged: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


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
