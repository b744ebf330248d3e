"""Tiny tokenizers, whose tokens are whatever a test needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from inferq.worker.engine.text.tokenizer import Tokenizer

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MakeTokenizer = Callable[..., Tokenizer]


def byte_level_words(words: Sequence[str]) -> FastTokenizer:
    """A byte-level tokenizer: every byte is a token, and so is each of `words`."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = ["".join(token for token, _ in splitter.pre_tokenize_str(word)) for word in words]
    tokens = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *spelled])
    fast = FastTokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    fast.pre_tokenizer = splitter
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS.values()])
    return fast


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """Build a byte-level tokenizer with the words given as tokens besides the bytes."""

    def make(*words: str, chat_template: str | None = None) -> Tokenizer:
        return Tokenizer(
            byte_level_words(words), special_tokens=SPECIAL_TOKENS, chat_template=chat_template
        )

    return make


@pytest.fixture(scope="session")
def spell() -> Callable[..., list[int]]:
    """The token ids of pieces: one for a word that is a token, else one for each byte."""

    def ids(tokenizer: Tokenizer, *pieces: str) -> list[int]:
        token_ids: list[int] = []
        for piece in pieces:
            spelled = "".join(
                token for token, _ in tokenizer._fast.pre_tokenizer.pre_tokenize_str(piece)
            )
            known = tokenizer._fast.token_to_id(piece)
            known = tokenizer._fast.token_to_id(spelled) if known is None else known
            token_ids += tokenizer.encode(piece) if known is None else [known]
        return token_ids

    return ids


@pytest.fixture(scope="session")
def real_tokenizer(smollm2: Path) -> Tokenizer:
    """SmolLM2's tokenizer."""
    return Tokenizer.load(smollm2)
