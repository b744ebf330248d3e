"""A SentencePiece vocabulary in a GGUF file becomes an equal fast tokenizer."""

from __future__ import annotations

import pytest

from inferq.protocol.params import SamplingParams
from inferq.worker.engine.text.output import OutputText
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.model.gguf_import.gguf_file import open_gguf
from inferq.worker.model.gguf_import.gguf_tokenizer import build_tokenizer

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
#: Pieces by falling score, as SentencePiece ranks them.
PIECES = ["▁t", "he", "▁the", "▁", "t", "h", "e", "c", "a", "ca", "▁ca", "▁cat", "▁▁"]
TOKENS = [*SPECIAL, *BYTES, *PIECES]
SCORES = [*(0.0 for _ in SPECIAL + BYTES), *(-float(rank) for rank in range(len(PIECES)))]
#: GGUF's kinds: unknown, control, byte, normal.
TYPES = [2, 3, 3, *(6 for _ in BYTES), *(1 for _ in PIECES)]


def _sentencepiece(*, space_prefix: bool) -> dict:
    return {
        "tokenizer.ggml.model": lambda w: w.add_tokenizer_model("llama"),
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": lambda w: w.add_token_list(TOKENS),
        "tokenizer.ggml.scores": lambda w: w.add_token_scores(SCORES),
        "tokenizer.ggml.token_type": lambda w: w.add_token_types(TYPES),
        "tokenizer.ggml.bos_token_id": lambda w: w.add_bos_token_id(1),
        "tokenizer.ggml.eos_token_id": lambda w: w.add_eos_token_id(2),
        "unknown": lambda w: w.add_unk_token_id(0),
        "space": lambda w: w.add_add_space_prefix(space_prefix),
    }


@pytest.fixture
def tokenizer(write_gguf, tmp_path):
    """Build the tokenizer of such a file, with or without a space before the text."""

    def build(*, space_prefix: bool = True) -> Tokenizer:
        tiny = write_gguf(override=_sentencepiece(space_prefix=space_prefix))
        fast, config = build_tokenizer(open_gguf(tiny.path))
        special = {name: config[name] for name in ("bos_token", "eos_token")}
        return Tokenizer(fast, special_tokens=special)

    return build


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer._fast.id_to_token(i) for i in tokenizer.encode(text)]


def test_pieces_are_merged_in_the_order_of_their_scores(tokenizer):
    assert _pieces(tokenizer(), "the cat") == ["<s>", "▁the", "▁cat"]
    # Without the space there is no "▁t" that "he" could follow.
    assert _pieces(tokenizer(space_prefix=False), "the") == ["<s>", "t", "he"]


def test_what_has_no_piece_falls_back_to_bytes(tokenizer):
    assert _pieces(tokenizer(), "é")[1:] == ["▁", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("space_prefix", [True, False])
@pytest.mark.parametrize("text", ["the cat", " the", "  the  cat ", "the é🫠 cat", "é", "🫠🇫🇷"])
def test_text_comes_back_as_it_was_whole_and_streamed(tokenizer, space_prefix, text):
    built = tokenizer(space_prefix=space_prefix)
    ids = built.encode(text)
    assert built.decode(ids) == text
    output = OutputText(built, SamplingParams())
    pieces = [piece for i in ids for piece in output.append([i]).text_pieces]
    assert "".join(pieces) + output.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stop_string_in_the_last_bytes_is_found_at_the_end(tokenizer):
    built = tokenizer()
    output = OutputText(built, SamplingParams(stop="🫠"))
    assert "".join(output.append(built.encode("the 🫠")).text_pieces) == "the "
    assert output.stop is None
    assert output.finish() == ""
    assert output.stop == "🫠"
