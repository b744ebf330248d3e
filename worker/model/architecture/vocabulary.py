"""A model's tokens as its tokenizer.json tells them: how many, and how texts are spelled."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from inferq.protocol.errors import ModelError
from inferq.worker.model.loading.tokenizer_file import tokenizer_json


class ModelVocabulary:
    """The tokenizer of a model folder, read when it is first needed.

    Raises `ModelError` where there is none, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a piece of text, without special tokens around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def tokenizer_json(self) -> str:
        """Return the tokenizer in the form of tokenizer.json."""
        if (content := tokenizer_json(self._folder)) is None:
            raise ModelError(f"{self._folder} has no tokenizer.json")
        return content

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(self.tokenizer_json())
        except ModelError:
            raise
        except Exception as error:  # noqa: BLE001 - the Rust side raises bare exceptions
            raise ModelError(f"{self._folder}/tokenizer.json is damaged: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def tokenizer_vocab_size(folder: Path) -> int | None:
    """Return the highest id of `folder`'s tokenizer plus one; None where there is none."""
    try:
        if (file := tokenizer_json(folder)) is None:
            return None
        content = json.loads(file)
        vocabulary = content["model"]["vocab"]
        # Unigram models list their pieces in the order of the ids.
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in content.get("added_tokens") or []]
        return int(max((*ids, *added))) + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{folder}/tokenizer.json is not a tokenizer file: {error!r}") from None
