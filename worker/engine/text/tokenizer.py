"""The tokenizer of a model folder: text and chat messages in, token ids out, and back.

Reads the folder with `tokenizers` and Jinja alone: transformers takes seconds to import.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Unpack

from tokenizers import Tokenizer as FastTokenizer

from inferq.protocol.errors import InvalidRequestError, ModelError
from inferq.protocol.prompts import ChatMessage
from inferq.worker.engine.sampling.sampling_defaults import SamplingDefaults
from inferq.worker.engine.text.chat_template import ChatOptions, ChatTemplate
from inferq.worker.engine.text.detokenizer import (
    Detokenizer,
    JoinedSpecialTokens,
    detokenizer_factory,
    token_bytes_table,
)
from inferq.worker.model.loading.tokenizer_file import tokenizer_json

_SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """What a model's folder says about requests: tokens, chat template, sampling defaults.

    `tool_template` is the chat template for conversations with tools, where it is another one. All
    methods may be called from any thread.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        sampling_defaults: SamplingDefaults | None = None,
    ) -> None:
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        special = special_tokens or {}
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._template = None if chat_template is None else ChatTemplate(chat_template, special)
        self._tool_template = (
            self._template if tool_template is None else ChatTemplate(tool_template, special)
        )
        self._detokenizers = {
            skip: detokenizer_factory(fast, skip_special_tokens=skip) for skip in (True, False)
        }
        self._token_bytes = token_bytes_table(fast)
        self._special_token_ids = frozenset(
            token_id for token_id, token in fast.get_added_tokens_decoder().items() if token.special
        )
        self.bos_token_id = self._id_of(special.get("bos_token"))
        self.eos_token_id = self._id_of(special.get("eos_token"))
        added = fast.encode("", add_special_tokens=True).ids
        self._adds_bos = self.bos_token_id is not None and added[:1] == [self.bos_token_id]

    @classmethod
    def load(cls, folder: Path | str, generation_config: str = "auto") -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template of a model folder.

        Its generation_config.json gives the sampling defaults, unless `generation_config` is
        "none". A tokenizer of an older form
        is converted. Raises `ModelError` for a folder without one, or with damaged files.
        """
        path = Path(folder)
        content = tokenizer_json(path)
        if content is None:
            raise ModelError(f"{path} has no tokenizer.json")
        try:
            fast = FastTokenizer.from_str(content)
        except Exception as error:  # noqa: BLE001 - the Rust side raises bare exceptions
            raise ModelError(f"{path}/tokenizer.json is damaged: {error}") from None
        config = _read_json(path / "tokenizer_config.json")
        special = _special_tokens(_read_json(path / "special_tokens_map.json") | config)
        templates = _chat_templates(path, config)
        return cls(
            fast,
            special_tokens=special,
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
            sampling_defaults=None if generation_config == "none" else SamplingDefaults.load(path),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may be padded beyond."""
        return self._fast.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text prompt, with the special tokens that belong around it.

        Without `add_special_tokens` it gets none. A text that spells out the beginning-of-sequence
        token gets no second one. An empty text is
        that token alone; where there is none, raises `InvalidRequestError`.
        """
        if not add_special_tokens:
            return self._fast.encode(text, add_special_tokens=False).ids
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `encode` of each text, in parallel on all cores."""
        encoded = self._fast.encode_batch_fast(list(texts), add_special_tokens=True)
        return [
            self._with_one_bos(encoding.ids) if text else self._empty_prompt()
            for text, encoding in zip(texts, encoded, strict=True)
        ]

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        now: datetime | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Return the token ids of a conversation; its template says which special tokens.

        Raises `InvalidRequestError` (field `messages`) when the model has no chat template, or the
        template refuses the messages.
        """
        text = self.chat_text(messages, now=now, **options)
        return self._fast.encode(text, add_special_tokens=False).ids

    def chat_text(
        self,
        messages: Sequence[ChatMessage],
        *,
        now: datetime | None = None,
        **options: Unpack[ChatOptions],
    ) -> str:
        """Return a conversation as the text that the model sees; see `render_chat`."""
        template = self._tool_template if options.get("tools") else self._template
        if template is None:
            raise InvalidRequestError(
                "the model has no chat template; send a text prompt instead", field="messages"
            )
        return template.render(messages, now=now, **options)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of finished tokens; growing ones go through `detokenizer`."""
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token stands for, which need not be whole characters, special ones too.

        None of an id outside the vocabulary.
        """
        return self._token_bytes[token_id]

    @functools.cached_property
    def total_token_bytes(self) -> int:
        """How many bytes `token_bytes` of all tokens are together; worked out when first asked."""
        return sum(len(self._token_bytes[token_id]) for token_id in range(self.vocab_size))

    def decode_token(self, token_id: int) -> str:
        """Return one token as it would be shown by itself, special tokens included."""
        return self.decode([token_id], skip_special_tokens=False)

    def detokenizer(
        self, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> Detokenizer:
        """Return a detokenizer for a new output."""
        detokenizer = self._detokenizers[skip_special_tokens]()
        if skip_special_tokens or spaces_between_special_tokens:
            return detokenizer
        return JoinedSpecialTokens(detokenizer, self._special_token_ids)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._fast.token_to_id(token)

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_token_id
        return ids[1:] if self._adds_bos and ids[:2] == [bos, bos] else ids

    def _empty_prompt(self) -> list[int]:
        if self.bos_token_id is None:
            raise InvalidRequestError(
                "is empty, and the model has no token to begin a text with", field="prompt", limit=1
            )
        return [self.bos_token_id]


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} is damaged: not a JSON object")
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by role; each may be a string or a serialized AddedToken."""
    tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
    contents = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in tokens.items()
    }
    return {name: token for name, token in contents.items() if isinstance(token, str)}


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: `default`, perhaps `tool_use`, perhaps others."""
    listed = config.get("chat_template")
    if isinstance(listed, list):
        found = {entry.get("name"): entry.get("template") for entry in listed}
    else:
        found = {"default": listed}
    more = folder / "additional_chat_templates"
    files = {file.stem: file for file in sorted(more.glob("*.jinja"))}
    files["default"] = folder / "chat_template.jinja"
    found |= {
        name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()
    }
    return {name: text for name, text in found.items() if isinstance(text, str)}
