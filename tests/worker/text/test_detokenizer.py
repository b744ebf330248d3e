"""Text that grows token by token is the tokenizer's own decode of all of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from inferq.protocol.errors import ModelError
from inferq.worker.engine.text.detokenizer import detokenizer_factory
from inferq.worker.engine.text.tokenizer import Tokenizer

#: Bytes that begin, continue and break characters, more often than chance would.
TELLING_BYTES = [0x20, 0x41, 0x7F, 0x80, 0x9F, 0xBF, 0xC0, 0xC3, 0xE0, 0xE4, 0xED, 0xF0, 0xF4, 0xFF]

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(0x100) if byte not in PRINTABLE]
#: GPT-2's spelling of each byte.
BYTE_ALPHABET = {byte: chr(byte) for byte in PRINTABLE} | {
    byte: chr(0x100 + i) for i, byte in enumerate(OTHERS)
}


def _byte_level() -> FastTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["DEF", "ĠtheĠ", "âĢ", "Ļs", "ðŁ", "ĺ", "Ģx"]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *words])}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken("<|end▁of▁text|>", special=True), AddedToken("日本 ", special=False)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def _sentencepiece(*, strip: bool) -> FastTokenizer:
    words = ["<unk>", "<s>", "</s>", "▁", "▁▁", "▁a", "b", "日本", "▁<0x41>", "<0x4>", "c▁d"]
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = FastTokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if strip else steps
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


TOKENIZERS = {
    "byte-level": _byte_level(),
    "sentencepiece": _sentencepiece(strip=False),
    "sentencepiece-stripped": _sentencepiece(strip=True),
}


def _stream(tokenizer: FastTokenizer, ids: list[int], *, skip: bool) -> list[str]:
    detokenizer = detokenizer_factory(tokenizer, skip_special_tokens=skip)()
    return [*(detokenizer.append(i) for i in ids), detokenizer.finish()]


def _byte_token(name: str, byte: int) -> int:
    if name == "byte-level":
        return TOKENIZERS[name].token_to_id(BYTE_ALPHABET[byte])
    return TOKENIZERS[name].token_to_id(f"<0x{byte:02X}>")


@pytest.mark.parametrize("skip", [True, False], ids=["skip-special", "keep-special"])
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_pieces_of_any_tokens_concatenate_to_the_whole_decode(name, skip, data):
    tokenizer = TOKENIZERS[name]
    any_id = st.integers(0, tokenizer.get_vocab_size() + 2)
    telling = st.sampled_from([_byte_token(name, byte) for byte in TELLING_BYTES])
    ids = data.draw(st.lists(any_id | telling, max_size=24))
    streamed = "".join(_stream(tokenizer, ids, skip=skip))
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("text", ["ďábelské", "今天天气如何？", "🫠🇫🇷👩‍👩‍👧"])  # noqa: RUF001
def test_a_character_over_several_tokens_is_never_shown_as_a_replacement_character(name, text):
    tokenizer = TOKENIZERS[name]
    ids = [_byte_token(name, byte) for byte in text.encode()]
    pieces = _stream(tokenizer, ids, skip=True)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_byte_level_text_is_shown_as_soon_as_its_last_byte_is_there():
    tokenizer = TOKENIZERS["byte-level"]
    ids = [tokenizer.token_to_id(character) for character in ("Ã", "©", "A")]
    assert _stream(tokenizer, ids, skip=True) == ["", "é", "A", ""]


def test_an_unfinished_character_comes_out_once_at_the_end():
    tokenizer = TOKENIZERS["byte-level"]
    ids = [tokenizer.token_to_id(token) for token in ("DEF", "ðŁ", "ĺ")]
    assert _stream(tokenizer, ids, skip=True) == ["DEF", "", "", "\ufffd"]


def test_a_skipped_special_token_does_not_break_a_character():
    tokenizer = TOKENIZERS["byte-level"]
    ids = [tokenizer.token_to_id(token) for token in ("Ã", "<s>", "©")]
    assert "".join(_stream(tokenizer, ids, skip=True)) == "é"
    assert "".join(_stream(tokenizer, ids, skip=False)) == "\ufffd<s>\ufffd"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Metaspace(),
        decoders.Sequence([decoders.ByteFallback()]),
        decoders.Sequence(
            [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", right=1)]
        ),
    ],
    ids=["none", "wordpiece", "metaspace", "no-fuse", "strip-of-the-end"],
)
def test_a_decoder_that_cannot_be_followed_is_refused(decoder):
    tokenizer = FastTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(ModelError, match="decoder"):
        detokenizer_factory(tokenizer, skip_special_tokens=True)


def _decode(tokenizer: Tokenizer, ids: list[int], **options) -> str:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False, **options)
    return "".join([*(detokenizer.append(i) for i in ids), detokenizer.finish()])


def test_the_space_between_two_special_tokens_can_be_left_out():
    fast = _sentencepiece(strip=False)
    fast.add_special_tokens(["▁<tool>"])
    tokenizer = Tokenizer(fast)
    tool, begin, word, space = (fast.token_to_id(t) for t in ("▁<tool>", "<s>", "b", "▁"))
    ids = [begin, tool, tool, word, tool, space, tool]
    assert _decode(tokenizer, ids) == fast.decode(ids, skip_special_tokens=False)
    assert _decode(tokenizer, ids) == "<s> <tool> <tool>b <tool>  <tool>"
    joined = _decode(tokenizer, ids, spaces_between_special_tokens=False)
    assert joined == "<s><tool><tool>b <tool>  <tool>"


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_where_a_decoder_puts_no_such_space_nothing_is_left_out(name, data):
    fast = TOKENIZERS[name]
    tokenizer = Tokenizer(fast)
    special = [i for i, t in fast.get_added_tokens_decoder().items() if t.special]
    any_id = st.integers(0, fast.get_vocab_size() + 2)
    ids = data.draw(st.lists(any_id | st.sampled_from(special), max_size=24))
    assert _decode(tokenizer, ids, spaces_between_special_tokens=False) == fast.decode(
        ids, skip_special_tokens=False
    )
