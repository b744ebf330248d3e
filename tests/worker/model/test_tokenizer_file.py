"""Tokenizers of folders that have no tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from inferq.protocol.errors import ModelError
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.model.architecture.vocabulary import ModelVocabulary, tokenizer_vocab_size
from inferq.worker.model.loading.tokenizer_file import tokenizer_json

#: As OPT's: 4 special tokens, the bytes, and one merge.
TOKENS = ["<s>", "<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]


def write_opt(folder: Path, merges: str = "#version: 0.2\na b\n") -> None:
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(TOKENS)}))
    (folder / "merges.txt").write_text(merges)
    (folder / "config.json").write_text(json.dumps({"model_type": "opt"}))
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}
    names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **names}))


def test_vocabulary_and_merges_become_a_fast_tokenizer(tmp_path: Path) -> None:
    write_opt(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert list(tokenizer.encode("abc")) == [2, len(TOKENS) - 1, TOKENS.index("c")]
    assert tokenizer.eos_token_id == 2
    assert tokenizer_vocab_size(tmp_path) == len(TOKENS)
    assert ModelVocabulary(tmp_path).tokenize("ab") == [len(TOKENS) - 1]


def test_a_folder_without_any_tokenizer_has_none(tmp_path: Path) -> None:
    assert tokenizer_json(tmp_path) is None
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_file_that_is_no_text_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(tmp_path)


def test_what_cannot_be_converted_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no SentencePiece model")
    with pytest.raises(ModelError, match=r"tokenizer\.model cannot be converted to one"):
        Tokenizer.load(tmp_path)
