"""The tokenizer of a GGUF file as Hugging Face's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from inferq.protocol.errors import ModelError
from inferq.worker.model.gguf_import.gguf_file import GgufFile

_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: How text is split before the merges, by the pre-tokenizer's name; None is GPT-2's own split.
#: smollm: as transformers reads such files. The model's original also sets digits apart, which
#: differs only in a run of white space before a digit, its vocabulary having no longer numbers.
_SPLITS: Final[dict[str, str | None]] = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
}
_SPACE: Final = "\u2581"


class _TokenType(IntEnum):
    """GGUF's kinds of tokens that need more than an entry in the vocabulary."""

    CONTROL = 3
    USER_DEFINED = 4


def build_tokenizer(gguf: GgufFile) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer and the content of tokenizer_config.json.

    Raises `ModelError` for kinds of tokenizers that we would not rebuild exactly.
    """
    kind = gguf.require("tokenizer.ggml.model", str)
    tokens = gguf.require("tokenizer.ggml.tokens", tuple)
    if kind == "gpt2":
        tokenizer = _byte_level(gguf, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(gguf, tokens)
    else:
        raise ModelError(f"{gguf.path}: tokenizer {kind!r} is not supported; gpt2 and llama are")
    types = gguf.get("tokenizer.ggml.token_type", tuple) or ()
    for wanted, special in ((_TokenType.CONTROL, True), (_TokenType.USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, token_type in zip(tokens, types, strict=False)
                if token_type == wanted
            ]
        )
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelError(f"{gguf.path}: the vocabulary names some tokens twice")
    _add_bos(gguf, tokenizer, tokens, default=kind == "llama")
    return tokenizer, _tokenizer_config(gguf, tokens)


def eos_token_ids(gguf: GgufFile) -> list[int]:
    """Return the tokens that end a text: of the sequence, of a turn, of a message."""
    tokens = gguf.require("tokenizer.ggml.tokens", tuple)
    ids = (_token_id(gguf, role, tokens) for role in ("eos", "eot", "eom"))
    return sorted({i for i in ids if i is not None})


def _byte_level(gguf: GgufFile, tokens: tuple[str, ...]) -> Tokenizer:
    name = gguf.get("tokenizer.ggml.pre", str) or "none"
    if name not in _SPLITS:
        raise ModelError(
            f"{gguf.path}: pre-tokenizer {name!r} is not supported; {', '.join(_SPLITS)} are"
        )
    merges = [tuple(m.split(" ")) for m in gguf.require("tokenizer.ggml.merges", tuple)]
    if any(len(merge) != 2 for merge in merges):
        raise ModelError(f"{gguf.path}: a merge does not have two parts")
    tokenizer = Tokenizer(_bpe(gguf, tokens, merges, ignore_merges=_SPLITS[name] is not None))
    if (split := _SPLITS[name]) is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: GgufFile, tokens: tuple[str, ...]) -> Tokenizer:
    scores = gguf.require("tokenizer.ggml.scores", tuple)
    unknown = _token_id(gguf, "unknown", tokens) or 0
    merges = _merges_of_scores(tokens, scores)
    tokenizer = Tokenizer(
        _bpe(gguf, tokens, merges, unk_token=tokens[unknown], byte_fallback=True, fuse_unk=True)
    )
    add_prefix = gguf.get("tokenizer.ggml.add_space_prefix", bool) is not False
    spaces = normalizers.Replace(" ", _SPACE)
    strip: list[decoders.Decoder] = []
    tokenizer.normalizer = spaces
    if add_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        strip = [decoders.Strip(content=" ", left=1)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_of_scores(tokens: tuple[str, ...], scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """Return the merges, best first, that build SentencePiece's pieces in the order of scores."""
    ids = {token: i for i, token in enumerate(tokens)}
    ranked = [
        (-score, ids[token[:cut]], ids[token[cut:]])
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(tokens[left], tokens[right]) for _, left, right in sorted(ranked)]


def _bpe(gguf: GgufFile, tokens: tuple[str, ...], merges: list[Any], **options: Any) -> models.BPE:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # noqa: BLE001 - the Rust side raises bare exceptions
        raise ModelError(f"{gguf.path}: the tokenizer is damaged: {error}") from None


def _add_bos(
    gguf: GgufFile, tokenizer: Tokenizer, tokens: tuple[str, ...], *, default: bool
) -> None:
    asked = gguf.get("tokenizer.ggml.add_bos_token", bool)
    bos_id = _token_id(gguf, "bos", tokens)
    if bos_id is None or not (default if asked is None else asked):
        return
    bos = tokens[bos_id]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, bos_id)]
    )


def _tokenizer_config(gguf: GgufFile, tokens: tuple[str, ...]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.require("llama.context_length", int),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := _token_id(gguf, key, tokens)) is not None:
            config[f"{name}_token"] = tokens[token_id]
    if (template := gguf.get("tokenizer.chat_template", str)) is not None:
        config["chat_template"] = template
    return config


def _token_id(gguf: GgufFile, role: str, tokens: tuple[str, ...]) -> int | None:
    token_id = gguf.get(f"tokenizer.ggml.{role}_token_id", int)
    if token_id is not None and not 0 <= token_id < len(tokens):
        raise ModelError(
            f"{gguf.path}: {role}_token_id {token_id} is not among the {len(tokens)} tokens"
        )
    return token_id
