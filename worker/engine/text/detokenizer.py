"""From tokens to text, one token at a time, as the tokenizer would decode them all at once."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

from tokenizers import Tokenizer as FastTokenizer

from inferq.protocol.errors import ModelError

REPLACEMENT_CHARACTER: Final = "\ufffd"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """The text of one growing token list, in constant time for each token.

    What `append` and `finish` return, concatenated, is the tokenizer's decode of all tokens.
    Characters are held back until their bytes are complete, so U+FFFD stands only for bytes that
    are no text.
    """

    def append(self, token_id: int) -> str:
        """Return the text that this token completes; ids outside the vocabulary have none."""
        ...

    def finish(self) -> str:
        """Return what was held back, an unfinished character as U+FFFD; no tokens may follow."""
        ...


#: Starts a detokenizer for a new output.
DetokenizerFactory = Callable[[], Detokenizer]


def detokenizer_factory(
    tokenizer: FastTokenizer, *, skip_special_tokens: bool
) -> DetokenizerFactory:
    """Return what starts detokenizers for `tokenizer`; all of them share one table of pieces.

    Raises `ModelError` for a decoder that we cannot follow token by token.
    """
    steps = _decoder_steps(tokenizer)
    tokens = _Tokens(tokenizer, skip_special_tokens=skip_special_tokens)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        pieces = _BytePieces(tokens)
        return lambda: ByteLevelDetokenizer(pieces)
    replacements, strip = _sentencepiece_rules(steps)
    text_pieces = _TextPieces(tokens, replacements)
    return lambda: SentencePieceDetokenizer(text_pieces, *strip)


def token_bytes_table(tokenizer: FastTokenizer) -> Mapping[int, bytes]:
    """Return the bytes of each token by its id, worked out when first asked for.

    Special and added tokens are spelled as they are; ids outside the vocabulary have none. Raises
    `ModelError` for a decoder that we cannot follow token by token.
    """
    steps = _decoder_steps(tokenizer)
    tokens = _Tokens(tokenizer, skip_special_tokens=False)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        added = tokenizer.get_added_tokens_decoder()
        return _BytePieces(
            tokens, {token_id: token.content.encode() for token_id, token in added.items()}
        )
    replacements, _ = _sentencepiece_rules(steps)
    return _EncodedPieces(_TextPieces(tokens, replacements))


class ByteLevelDetokenizer:
    """Detokenizer of byte-level BPE: every token is a string of bytes."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def append(self, token_id: int) -> str:
        """See `Detokenizer`."""
        return self._decode(self._pieces[token_id])

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._decode(b"", True)


class SentencePieceDetokenizer:
    """Detokenizer of SentencePiece's tokenizers: tokens are text, except for byte tokens.

    A run of byte tokens is text only as a whole (one bad byte turns each byte of the run into
    U+FFFD), so it is held back to its end.
    """

    __slots__ = ("_pieces", "_run", "_strip_character", "_strip_count")

    def __init__(
        self, pieces: Mapping[int, str | int], strip_character: str, strip_count: int
    ) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._strip_character = strip_character
        self._strip_count = strip_count

    def append(self, token_id: int) -> str:
        """See `Detokenizer`."""
        piece = self._pieces[token_id]
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if self._run and piece:
            piece = self._end_run() + piece
        return self._strip(piece) if self._strip_count else piece

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT_CHARACTER * len(run)

    def _strip(self, text: str) -> str:
        """Drop the first characters of the whole text while they are those to strip."""
        while self._strip_count and text:
            if text[0] != self._strip_character:
                self._strip_count = 0
                break
            text = text[1:]
            self._strip_count -= 1
        return text


class JoinedSpecialTokens:
    """A detokenizer without the spaces that its decoder puts between two special tokens.

    Only a decoder that spells a special token with a space before it does so (SentencePiece's
    with a token such as `▁<tool>`); byte-level ones put nothing there that could be left out.
    """

    __slots__ = ("_detokenizer", "_follows_special", "_special_token_ids")

    def __init__(self, detokenizer: Detokenizer, special_token_ids: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._special_token_ids = special_token_ids
        self._follows_special = False

    def append(self, token_id: int) -> str:
        """See `Detokenizer`."""
        text = self._detokenizer.append(token_id)
        is_special = token_id in self._special_token_ids
        if is_special and self._follows_special:
            text = text.lstrip(" ")
        self._follows_special = is_special
        return text

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._detokenizer.finish()


class NoText:
    """The detokenizer of an output that is wanted as token ids alone."""

    __slots__ = ()

    def append(self, token_id: int) -> str:  # noqa: ARG002 - the protocol's form
        """See `Detokenizer`."""
        return ""

    def finish(self) -> str:
        """See `Detokenizer`."""
        return ""


class _Tokens:
    """The tokens' strings, without those that have no text."""

    def __init__(self, tokenizer: FastTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder() if skip_special_tokens else {}
        self._skipped = frozenset(token.content for token in added.values() if token.special)

    def __getitem__(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        return "" if token is None or token in self._skipped else token


class _BytePieces(dict[int, bytes]):
    """The bytes of each token, worked out when first asked for."""

    def __init__(self, tokens: _Tokens, known: Mapping[int, bytes] = MappingProxyType({})) -> None:
        super().__init__(known)
        self._tokens = tokens
        self._bytes = _byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokens[token_id]
        try:
            piece = bytes([self._bytes[character] for character in token])
        except KeyError:
            # An added token, which is spelled as it is.
            piece = token.encode()
        self[token_id] = piece
        return piece


class _TextPieces(dict[int, str | int]):
    """The text of each token, or the byte that it stands for, worked out when first asked for."""

    def __init__(self, tokens: _Tokens, replacements: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._tokens = tokens
        self._replacements = replacements

    def __missing__(self, token_id: int) -> str | int:
        token = self._tokens[token_id]
        for old, new in self._replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token)
        piece = token if byte is None else int(byte[1], 16)
        self[token_id] = piece
        return piece


class _EncodedPieces(dict[int, bytes]):
    """The bytes of pieces, worked out when first asked for."""

    def __init__(self, pieces: _TextPieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __missing__(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        encoded = bytes([piece]) if isinstance(piece, int) else piece.encode()
        self[token_id] = encoded
        return encoded


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 for itself, the other bytes from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _decoder_steps(tokenizer: FastTokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
    if decoder is None:
        raise ModelError("the tokenizer has no decoder")
    steps: list[dict[str, Any]] = (
        decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    )
    return steps


def _sentencepiece_rules(
    steps: list[dict[str, Any]],
) -> tuple[list[tuple[str, str]], tuple[str, int]]:
    """Return the replacements within tokens, and what to strip (how often) from the text's start.

    The form: replacements, ByteFallback, Fuse, and perhaps a Strip of the start.
    """
    replacements = []
    rest = list(steps)
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    match rest:
        case [{"type": "ByteFallback"}, {"type": "Fuse"}]:
            return replacements, ("", 0)
        case [
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": str(character), "start": int(count), "stop": 0},
        ]:
            return replacements, (character, count)
    kinds = " + ".join(step["type"] for step in steps)
    raise ModelError(f"a tokenizer with the decoder {kinds} is not supported")
