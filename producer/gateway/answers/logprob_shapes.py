"""Log-probabilities in OpenAI's shapes: of chats, of completions, and vLLM's of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from inferq.protocol.messages import TokenLogprob

#: The bytes of each token that occurs.
Texts = Mapping[int, bytes]
#: What a token that is impossible has for a log-probability: JSON has no infinity.
_LEAST: Final = -9999.0


def token_text(raw: bytes) -> str:
    r"""Return a token's text; of bytes that are not text alone, an escape such as `\xe2\x82`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)


def legacy_token_text(raw: bytes) -> str:
    r"""Return a token's text as completions tell it: bytes that are not text as `bytes:\xe2`."""
    text = token_text(raw)
    return text if text.encode() == raw else f"bytes:{text}"


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], texts: Texts
) -> list[dict[str, Any]]:
    """Return the items of `logprobs.content` of a chat's choice."""
    return [
        {
            **_chat_token(token_id, entry.logprob, texts),
            "top_logprobs": [_chat_token(other, value, texts) for other, value in entry.top],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def _chat_token(token_id: int, logprob: float, texts: Texts) -> dict[str, Any]:
    raw = texts.get(token_id, b"")
    return {"token": token_text(raw), "logprob": max(logprob, _LEAST), "bytes": list(raw)}


class CompletionLogprobs:
    """The `logprobs` of one choice of a completion, in pieces; counts where each token begins.

    `text_offset` counts the characters of the tokens before, as vLLM does; a token that continues
    a character has that character's offset.
    """

    def __init__(self, shown: int) -> None:
        self._shown = shown
        self._characters = 0

    def piece(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], texts: Texts
    ) -> dict[str, list[Any]]:
        """Return the piece of the next tokens; the first token of a prompt has no logprob."""
        tokens, values, tops, offsets = [], [], [], []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            raw = texts.get(token_id, b"")
            tokens.append(legacy_token_text(raw))
            values.append(None if entry is None else max(entry.logprob, _LEAST))
            tops.append(None if entry is None else self._top(token_id, entry, texts))
            offsets.append(self._characters - (_continues(raw) and self._characters > 0))
            self._characters += sum(byte & 0xC0 != 0x80 for byte in raw)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, token_id: int, entry: TokenLogprob, texts: Texts) -> dict[str, float]:
        """Return the most likely tokens, and the chosen one; of two with one text, the likelier."""
        shown = entry.top if self._shown < 0 else entry.top[: self._shown]
        top: dict[str, float] = {}
        for other, value in (*shown, (token_id, entry.logprob)):
            top.setdefault(legacy_token_text(texts.get(other, b"")), max(value, _LEAST))
        return top


def _continues(raw: bytes) -> bool:
    return bool(raw) and raw[0] & 0xC0 == 0x80


def join_completion_logprobs(pieces: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Return the whole `logprobs` of a choice from its pieces."""
    joined: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for piece in pieces:
        for name, values in joined.items():
            values.extend(piece[name])
    return joined


def prompt_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], texts: Texts
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each prompt token but the first, candidates by id.

    The rank of a token beyond the most likely ones is not known, and null.
    """
    return [
        None if entry is None else _candidates(token_id, entry, texts)
        for token_id, entry in zip(token_ids, logprobs, strict=True)
    ]


def _candidates(token_id: int, entry: TokenLogprob, texts: Texts) -> dict[str, Any]:
    ranked = {other: (value, rank) for rank, (other, value) in enumerate(entry.top, start=1)}
    candidates: dict[int, tuple[float, int | None]] = {token_id: (entry.logprob, None), **ranked}
    return {
        str(other): {
            "logprob": max(value, _LEAST),
            "rank": rank,
            "decoded_token": token_text(texts.get(other, b"")),
        }
        for other, (value, rank) in candidates.items()
    }
