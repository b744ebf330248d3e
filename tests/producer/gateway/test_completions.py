"""Completions by the official client: prompts, choices, the prompt's echo, streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from inferq.worker.engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

ANSWER = "Paris is the capital of France."
PROMPT = "Where is the tower?"


def test_a_completion_has_openais_shape(openai_client: openai.OpenAI, stand_in_worker: Any) -> None:
    stand_in_worker.say(ANSWER)
    raw = openai_client.completions.with_raw_response.create(
        model="stand-in", prompt=PROMPT, max_tokens=50, extra_body={"metadata": {"team": "a"}}
    )
    answer = raw.parse()
    assert answer.object == "text_completion"
    assert answer.model == "stand-in"
    assert answer.id == f"cmpl-{raw.headers['x-inferq-job-id']}"
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, ANSWER, "stop")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_an_answer_ends_with_the_context_whatever_was_asked(
    start_stand_in: Callable[..., Any], start_gateway: Callable[..., Any]
) -> None:
    start_stand_in(step_s=0.0005, max_model_len=64)
    asked = {"model": "stand-in", "prompt": PROMPT, "max_tokens": 9000}
    answer = httpx.post(f"{start_gateway().url}/v1/completions", json=asked, timeout=60).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 64


def test_all_forms_of_prompts_work_and_are_answered_in_their_order(
    openai_client: openai.OpenAI, tokenizer: Tokenizer, stand_in_worker: Any
) -> None:
    ids = tokenizer.encode(PROMPT)
    other = tokenizer.encode("Another, longer prompt")
    counts: list[tuple[int, int]] = []
    for prompt in (PROMPT, ids, [PROMPT, "Another, longer prompt"], [ids, other]):
        answer = openai_client.completions.create(
            model="stand-in", prompt=prompt, max_tokens=4, n=2
        )
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        assert all(choice.finish_reason == "length" for choice in answer.choices)
        texts = [choice.text for choice in answer.choices]
        # the same two outputs for each prompt, and they differ
        assert texts == texts[:2] * (len(texts) // 2)
        assert texts[0] != texts[1]
        assert answer.usage is not None
        counts.append((answer.usage.prompt_tokens, answer.usage.completion_tokens))
    both = len(ids) + len(other)
    assert counts == [(len(ids), 8), (len(ids), 8), (both, 16), (both, 16)]
    with pytest.raises(openai.BadRequestError, match="never a mixture") as caught:
        openai_client.completions.create(
            model="stand-in",
            prompt=[PROMPT, 7],  # type: ignore[list-item]
        )
    assert caught.value.param == "prompt"


def test_a_choice_may_begin_with_its_prompt(
    openai_client: openai.OpenAI, tokenizer: Tokenizer, stand_in_worker: Any
) -> None:
    stand_in_worker.say(" There.")
    long_prompt = "All is well. " * 200  # too long to be kept beside the job
    for prompt, text in (
        (PROMPT, PROMPT),
        (tokenizer.encode(PROMPT), PROMPT),
        ([PROMPT, long_prompt], PROMPT),
    ):
        answer = openai_client.completions.create(
            model="stand-in", prompt=prompt, echo=True, max_tokens=20
        )
        assert answer.choices[0].text == text + " There."
        assert (
            answer.choices[-1].text
            == (text if len(answer.choices) == 1 else long_prompt) + " There."
        )
    stream = openai_client.completions.create(
        model="stand-in", prompt=PROMPT, echo=True, max_tokens=20, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == PROMPT + " There."


def test_many_prompts_of_any_characters_are_shown_in_one_stream(
    http: httpx.Client, stand_in_worker: Any
) -> None:
    """What is kept beside a job has its limits."""
    stand_in_worker.say(".")
    prompts = ["\u0001" * 1000, *(f'"{k}" ' + "é\\" * k for k in range(63))]
    asked = {"prompt": prompts, "max_tokens": 4, "echo": True, "stream": True}
    texts = dict.fromkeys(range(64), "")
    for chunk in _chunks(http.post("/v1/completions", json=asked).text):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == [prompt + "." for prompt in prompts]
    again = _chunks(http.get(f"/v1/streams/{chunk['id']}").text)
    shown = {c["choices"][0]["index"]: c["choices"][0]["text"] for c in reversed(again)}
    assert [shown[k] for k in range(64)] == prompts


def test_the_prompt_alone_is_scored_and_nothing_is_said(
    openai_client: openai.OpenAI, tokenizer: Tokenizer, stand_in_worker: Any
) -> None:
    answer = openai_client.completions.create(
        model="stand-in", prompt=PROMPT, echo=True, logprobs=2, max_tokens=0
    )
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert choice.logprobs is not None
    ids = tokenizer.encode(PROMPT)
    pieces = [tokenizer.decode([token_id]) for token_id in ids]
    assert choice.logprobs.tokens == pieces
    assert choice.logprobs.token_logprobs == [None, *[-0.5] * (len(ids) - 1)]
    assert choice.logprobs.text_offset == [len("".join(pieces[:k])) for k in range(len(pieces))]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.top_logprobs[1][pieces[1]] == -0.5
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)


def test_logprobs_of_prompt_and_answer_follow_each_other_also_in_a_stream(
    openai_client: openai.OpenAI, stand_in_worker: Any
) -> None:
    stand_in_worker.say("Grün ist 🌲 gut")  # a tree of several tokens
    asked: dict[str, Any] = {"model": "stand-in", "prompt": "Say", "echo": True, "logprobs": 1}
    [choice] = openai_client.completions.create(**asked, max_tokens=30).choices
    whole = choice.logprobs
    assert whole is not None
    assert whole.text_offset is not None
    assert whole.tokens is not None
    for token, offset in zip(whole.tokens, whole.text_offset, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice.text[offset : offset + len(token)] == token
    assert any(token.startswith("bytes:\\x") for token in whole.tokens)
    streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for chunk in openai_client.completions.create(**asked, max_tokens=30, stream=True):
        for name, values in streamed.items():
            logprobs = chunk.choices[0].logprobs
            values.extend(getattr(logprobs, name) if logprobs else ())
    assert streamed["tokens"] == whole.tokens
    assert streamed["token_logprobs"] == whole.token_logprobs
    assert streamed["text_offset"] == whole.text_offset


def test_vllms_reports_of_the_prompt_and_token_ids(
    http: httpx.Client, tokenizer: Tokenizer, stand_in_worker: Any
) -> None:
    stand_in_worker.say(ANSWER)
    asked = {"prompt": PROMPT, "max_tokens": 30, "prompt_logprobs": 1, "return_token_ids": True}
    answer = http.post("/v1/completions", json=asked).json()
    [choice] = answer["choices"]
    ids = tokenizer.encode(PROMPT)
    assert choice["prompt_token_ids"] == ids
    assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == ANSWER
    first, second, *_ = choice["prompt_logprobs"]
    assert first is None
    assert second[str(ids[1])] == {
        "logprob": -0.5, "rank": 1, "decoded_token": tokenizer.decode([ids[1]]),
    }  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, **asked}
    del chat["prompt"]
    told = http.post("/v1/chat/completions", json=chat).json()
    assert len(told["prompt_logprobs"]) == len(told["prompt_token_ids"])
    assert told["usage"]["prompt_tokens"] == len(told["prompt_token_ids"])


def test_best_of_and_beams_return_the_best(http: httpx.Client, stand_in_worker: Any) -> None:
    """The stand-in likes its first output best."""
    best = http.post("/v1/completions", json={"prompt": "Say", "max_tokens": 4, "best_of": 3})
    plain = http.post("/v1/completions", json={"prompt": "Say", "max_tokens": 4})
    assert best.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"]
    assert best.json()["usage"]["completion_tokens"] == 4
    beams = http.post(
        "/v1/completions",
        json={"prompt": "Say", "max_tokens": 4, "n": 2, "use_beam_search": True, "stream": True},
    )
    assert {chunk["choices"][0]["index"] for chunk in _chunks(beams.text)} == {0, 1}
    assert stand_in_worker.last_request.beam_width == 2


def _chunks(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line[:6] == "data: "]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_stream_of_several_prompts_and_choices_says_what_the_whole_answer_says(
    openai_client: openai.OpenAI, stand_in_worker: Any
) -> None:
    asked: dict[str, Any] = {
        "model": "stand-in", "prompt": ["One", "Two", "Three"], "n": 2, "max_tokens": 12,
    }  # fmt: skip
    whole = openai_client.completions.create(**asked)
    texts = dict.fromkeys(range(6), "")
    ends: dict[int, str] = {}
    usage = None
    for chunk in openai_client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        if not chunk.choices:
            usage = chunk.usage
            continue
        [choice] = chunk.choices
        assert choice.index not in ends
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            ends[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ends == dict.fromkeys(range(6), "length")
    assert usage == whole.usage


def test_a_stream_may_count_its_tokens_as_it_goes(http: httpx.Client, stand_in_worker: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": "One two", "max_tokens": 3, "stream": True, "stream_options": options}
    chunks = _chunks(http.post("/v1/completions", json=asked).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}
