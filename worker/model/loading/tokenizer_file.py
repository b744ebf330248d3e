"""A model folder's tokenizer in the form of tokenizer.json, converted where it is an older one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

from inferq.protocol.errors import ModelError

_log = logging.getLogger(__name__)

_FILE: Final = "tokenizer.json"
#: Files of older tokenizers, of which transformers makes fast ones.
_OLDER: Final = ("merges.txt", "tokenizer.model", "spiece.model", "vocab.txt")


def tokenizer_json(folder: Path) -> str | None:
    """Return the content of `folder`'s tokenizer.json, None where there is no tokenizer.

    Without that file, vocabulary and merges or a SentencePiece model are converted by transformers.
    Raises `ModelError` where that fails.
    """
    path = folder / _FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{path} is damaged: {error}") from None
    found = [name for name in _OLDER if (folder / name).is_file()]
    return _converted(folder, found[0]) if found else None


def _converted(folder: Path, name: str) -> str:
    from transformers import AutoTokenizer

    from_pretrained: Any = AutoTokenizer.from_pretrained
    try:
        tokenizer = from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        content: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:
        # Whatever transformers raises about a tokenizer, at the edge it is one error.
        raise ModelError(
            f"{folder} has no {_FILE}, and {name} cannot be converted to one: {error}"
        ) from error
    _log.info("%s has no %s: converted from %s", folder, _FILE, name)
    return content
