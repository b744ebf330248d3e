"""Tokens of prompts and conversations, and back, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from inferq.worker.engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

TEXT = "Grüße aus Zürich 🌲"


def test_text_becomes_tokens_and_tokens_become_text(
    http: httpx.Client, tokenizer: Tokenizer, stand_in_worker: Any
) -> None:
    told = http.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True}).json()
    assert told["tokens"] == tokenizer.encode(TEXT)
    assert told["count"] == len(told["tokens"])
    assert told["max_model_len"] == 4096
    assert "".join(told["token_strs"]).startswith("Grüße aus Zürich")
    back = http.post("/detokenize", json={"model": "stand-in", "tokens": told["tokens"]}).json()
    assert back == {"prompt": TEXT}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert http.post("/tokenize", json={"prompt": "a"}).json()["token_strs"] is None
    assert not stand_in_worker.engine.requests


def test_a_conversation_is_tokenized_as_the_model_gets_it(
    http: httpx.Client, tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    told = http.post("/tokenize", json={"messages": messages}).json()
    chat = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=chat).json()
    assert told["tokens"] == answer["prompt_token_ids"]
    asked = {"messages": messages, "add_generation_prompt": False}
    closed = http.post("/tokenize", json=asked).json()["tokens"]
    assert told["tokens"][: len(closed)] == closed
    assert len(closed) < len(told["tokens"])


def test_what_cannot_be_tokenized_is_refused(http: httpx.Client) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**8]}, "tokens"),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, (path, body, answer.text)
        assert answer.json()["error"]["param"] == param, (path, body, answer.text)
    assert http.post("/tokenize", json={"prompt": "a", "model": "nope"}).status_code == 404
