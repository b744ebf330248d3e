"""Jobs for a prompt's own tokens: the log that answers them, and what a takeover sends of it."""

from __future__ import annotations

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.messages import Event, FinishReason, Terminal, Usage
from inferq.protocol.output_log import JobLog
from inferq.protocol.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.jobs.tokenization import tokenized_log

END = Terminal(FinishReason.STOP, Usage(prompt_tokens=1))


@pytest.fixture
def tokenizer(make_tokenizer) -> Tokenizer:
    return make_tokenizer(
        "word", chat_template="<s>{% for m in messages %}{{ m.content }}{% endfor %}"
    )


def tokenized(prompt: Prompt, tokenizer: Tokenizer) -> JobLog:
    return tokenized_log(prompt, tokenizer, vocab_size=tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (TextPrompt("a €"), "a €"),
        (ChatPrompt((ChatMessage("user", "word"),)), "<s>word"),
    ],
)
def test_a_prompts_tokens_come_with_all_of_its_text(
    prompt: Prompt, text: str, tokenizer: Tokenizer
) -> None:
    log = tokenized(prompt, tokenizer)
    [(total, event)] = log.events(0, END)
    assert total == len(event.token_ids) == log.total
    assert event.text == text
    assert (event.finish_reason, event.terminal) == (FinishReason.STOP, END)
    assert b"".join(event.token_texts[i] for i in event.token_ids) == text.encode()
    assert Event.decode(event.encode()) == event


def test_token_ids_are_decoded_special_tokens_too(tokenizer: Tokenizer, spell) -> None:
    ids = spell(tokenizer, "word", "</s>", "€")
    [(_, event)] = tokenized(TokenPrompt(tuple(ids)), tokenizer).events(0, END)
    assert (list(event.token_ids), event.text) == (ids, "word</s>€")


def test_bytes_that_are_no_text_show_in_the_texts_of_tokens(tokenizer: Tokenizer, spell) -> None:
    ids = spell(tokenizer, "€")[:2]
    [(_, event)] = tokenized(TokenPrompt(tuple(ids)), tokenizer).events(0, END)
    assert event.text == "\ufffd"
    assert b"".join(event.token_texts[i] for i in ids) == "€".encode()[:2]


def test_a_long_prompt_travels_in_several_events_and_goes_on_after_those_published(
    tokenizer: Tokenizer,
) -> None:
    prompt = TextPrompt("ab€" * 2000)
    events = tokenized(prompt, tokenizer).events(0, END)
    assert len(events) > 3
    assert "".join(event.text for _, event in events) == prompt.text
    assert [event.terminal for _, event in events] == [None] * (len(events) - 1) + [END]
    published = events[1][0]
    rest = tokenized(prompt, tokenizer).events(published, END)
    assert rest == events[2:]


def test_a_takeover_after_all_tokens_sends_the_end_alone(tokenizer: Tokenizer) -> None:
    log = tokenized(TextPrompt("abc"), tokenizer)
    [(total, event)] = log.events(3, END)
    assert (total, event.token_ids, event.terminal) == (3, (), END)


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tokenized(TokenPrompt((1, tokenizer.vocab_size)), tokenizer)
    assert caught.value.field == "prompt_token_ids"


def test_a_conversation_without_a_template_is_refused(make_tokenizer) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tokenized(ChatPrompt((ChatMessage("user", "x"),)), make_tokenizer())
    assert caught.value.field == "messages"
