"""A prompt and its parameters are checked before the engine sees them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.messages import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.requests.request import PreparedRequest, prepare_request

CONTEXT = 16
VOCABULARY = 300
TEMPLATE = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def prepare(make_tokenizer):
    """Prepare a request for a context of 16 tokens and a vocabulary of 300."""
    tokenizer = make_tokenizer(chat_template=TEMPLATE)

    def prepare(prompt, *, now=None, **options) -> PreparedRequest:
        return prepare_request(
            prompt,
            SamplingParams(**options),
            tokenizer,
            max_model_len=CONTEXT,
            vocab_size=VOCABULARY,
            now=now,
        )

    return prepare


def test_each_kind_of_prompt_becomes_token_ids(prepare):
    now = datetime(2026, 1, 1, tzinfo=UTC)
    chat = ChatPrompt((ChatMessage("user", "abc"),))
    assert (
        prepare(chat, now=now).prompt_token_ids == prepare(TextPrompt("2026abc")).prompt_token_ids
    )
    assert prepare(TokenPrompt((7, 8))).prompt_token_ids == (7, 8)


@pytest.mark.parametrize(
    ("asked", "given"), [(None, CONTEXT - 3), (5, 5), (CONTEXT - 3, CONTEXT - 3), (999, 13)]
)
def test_max_tokens_is_cut_to_what_the_context_leaves(prepare, asked, given):
    prepared = prepare(TextPrompt("abc"), max_tokens=asked, temperature=0.5)
    assert prepared.max_tokens == given
    assert prepared.params == SamplingParams(max_tokens=given, temperature=0.5)


def test_a_prompt_may_leave_room_for_one_token(prepare):
    assert prepare(TextPrompt("a" * (CONTEXT - 1)), max_tokens=None).max_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt("a" * 16), "prompt"),
        (TextPrompt("a" * 100_000), "prompt"),
        (TokenPrompt((1,) * 16), "prompt_token_ids"),
        (ChatPrompt((ChatMessage("user", "a" * 12),)), "messages"),
    ],
    ids=["text", "long-text", "tokens", "chat"],
)
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(prepare, prompt, field):
    with pytest.raises(InvalidRequestError, match=r"\d+ tokens .* context of 16") as caught:
        prepare(prompt)
    assert (caught.value.field, caught.value.limit) == (field, "15")


def test_min_tokens_beyond_the_context_is_refused_with_the_numbers(prepare):
    with pytest.raises(InvalidRequestError, match=r"500 .* 13 .* 16") as caught:
        prepare(TextPrompt("abc"), min_tokens=500, max_tokens=500)
    assert (caught.value.field, caught.value.limit) == ("min_tokens", "13")


def test_a_prompt_token_outside_the_vocabulary_is_refused_by_its_id(prepare):
    with pytest.raises(InvalidRequestError, match="300") as caught:
        prepare(TokenPrompt((1, 300)))
    assert (caught.value.field, caught.value.limit) == ("prompt_token_ids", "[0, 299]")


def test_a_stop_token_outside_the_vocabulary_is_refused_by_its_id(prepare):
    with pytest.raises(InvalidRequestError, match="999999") as caught:
        prepare(TextPrompt("a"), stop_token_ids=[999999], min_tokens=4)
    assert caught.value.field == "stop_token_ids"


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, 3),
        ({"truncate_prompt_tokens": 50, "max_tokens": 1}, 10),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1}, 10),
        ({"truncate_prompt_tokens": -1, "max_tokens": 9}, 7),
        ({"truncate_prompt_tokens": -1, "max_tokens": 15}, 1),
        ({"truncate_prompt_tokens": -1, "max_tokens": 99, "min_tokens": 8}, 8),
        ({"truncate_prompt_tokens": -1, "max_tokens": None}, 10),
    ],
)
def test_a_truncated_prompt_keeps_its_end(prepare, options, kept):
    prepared = prepare(TokenPrompt(tuple(range(10))), **options)
    assert prepared.prompt_token_ids == tuple(range(10 - kept, 10))
    wanted = options.get("max_tokens")
    assert prepared.max_tokens == min(wanted or CONTEXT, CONTEXT - kept)


def test_truncation_saves_a_prompt_longer_than_the_context(prepare):
    prompt = TextPrompt("a" * 40)
    assert len(prepare(prompt, truncate_prompt_tokens=-1, max_tokens=4).prompt_token_ids) == 12
    with pytest.raises(InvalidRequestError, match="20 tokens leave no room") as error:
        prepare(prompt, truncate_prompt_tokens=20)
    assert error.value.code == "context_length_exceeded"


def test_chat_messages_need_a_chat_template(make_tokenizer):
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        prepare_request(
            ChatPrompt((ChatMessage("user", "a"),)),
            SamplingParams(),
            make_tokenizer(),
            max_model_len=CONTEXT,
            vocab_size=VOCABULARY,
        )
    assert caught.value.field == "messages"


def test_a_seed_is_kept_and_none_is_made_up(prepare):
    assert prepare(TextPrompt("a"), seed=7).params.seed == 7
    assert prepare(TextPrompt("a")).params.seed is None
