"""The bytes of single tokens: exact, whatever characters they cut through."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from inferq.worker.engine.text.tokenizer import Tokenizer

TEXT = "Příliš žluťoučký kůň 🫠👩‍👩‍👧\n\t今天 \x00 e\u0301"


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """A tokenizer as SentencePiece's are converted: text pieces, a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁He", "llo", "ž", "▁▁"]
    fast = FastTokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    fast.add_tokens([AddedToken("<tool>é")])
    return Tokenizer(fast)


def test_the_bytes_of_a_byte_level_tokens_are_those_of_the_text(real_tokenizer: Tokenizer) -> None:
    ids = real_tokenizer.encode(TEXT)
    assert b"".join(map(real_tokenizer.token_bytes, ids)) == TEXT.encode()
    assert any(_is_cut(real_tokenizer.token_bytes(token_id)) for token_id in ids)


def test_every_byte_has_a_token_in_a_byte_level_vocabulary(make_tokenizer) -> None:
    tokenizer = make_tokenizer()
    ids = range(tokenizer.vocab_size)
    assert {tokenizer.token_bytes(i) for i in ids} >= {bytes([b]) for b in range(256)}


def test_special_and_added_tokens_are_their_text(make_tokenizer, sentencepiece: Tokenizer) -> None:
    fast = make_tokenizer("word")._fast
    fast.add_tokens([AddedToken("<é>")])
    tokenizer = Tokenizer(fast)
    for text in ("<s>", "</s>", "<é>"):
        assert tokenizer.token_bytes(fast.token_to_id(text)) == text.encode()
    for text in ("<s>", "</s>", "<tool>é"):
        token_id = sentencepiece._fast.token_to_id(text)
        assert sentencepiece.token_bytes(token_id) == text.encode()


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("<0x00>", b"\x00"),
        ("<0xE2>", b"\xe2"),
        ("<0xFF>", b"\xff"),
        ("▁He", b" He"),
        ("▁▁", b"  "),
        ("ž", "ž".encode()),
    ],
)
def test_the_bytes_of_a_sentencepiece_token_are_exact(
    sentencepiece: Tokenizer, piece: str, expected: bytes
) -> None:
    assert sentencepiece.token_bytes(sentencepiece._fast.token_to_id(piece)) == expected


def test_an_id_outside_the_vocabulary_has_no_bytes(
    make_tokenizer, sentencepiece: Tokenizer
) -> None:
    assert make_tokenizer().token_bytes(10**6) == b""
    assert sentencepiece.token_bytes(10**6) == b""


def test_the_bytes_of_a_whole_vocabulary_are_counted(make_tokenizer) -> None:
    tokenizer = make_tokenizer("word")
    assert tokenizer.total_token_bytes == 256 + len("word") + len("<s>") + len("</s>")


def test_a_text_may_be_encoded_without_special_tokens(make_tokenizer) -> None:
    from tokenizers.processors import TemplateProcessing

    fast = make_tokenizer()._fast
    bos = fast.token_to_id("<s>")
    fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = Tokenizer(fast, special_tokens={"bos_token": "<s>"})
    plain = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("ab") == [bos, *plain]


def _is_cut(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return True
    return False
