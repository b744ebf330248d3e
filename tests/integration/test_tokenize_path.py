"""Tokens of prompts, and what a result tells of tokens: real server, real worker, real model."""

from __future__ import annotations

import pytest

from inferq import InvalidRequestError, JobFailed, SamplingParams
from inferq.protocol.replies import JobState

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

QUEUE = "tokenize-path"
QUESTION = {"role": "user", "content": "What is the capital of France?"}
TEXT = "Ďábelské ďatlíky 🫠"


@pytest.fixture(scope="module")
def worker(start_worker, valkey_url: str):
    return start_worker(valkey_url, QUEUE, max_jobs=1, num_kv_blocks=72)


@pytest.fixture
def client(worker, connect, valkey_url: str):
    return connect(valkey_url, QUEUE)


def test_a_text_and_its_token_ids_tell_the_same(client) -> None:
    tokens = client.tokenize(TEXT, timeout_s=120)
    assert tokens.text == TEXT
    assert b"".join(tokens.token_texts) == TEXT.encode()
    assert client.tokenize(list(tokens.token_ids), timeout_s=120) == tokens


def test_a_conversation_is_tokenized_as_a_job_for_its_answer_is(client) -> None:
    tokens = client.tokenize(messages=[QUESTION], timeout_s=120)
    assert QUESTION["content"] in tokens.text
    assert tokens.text.endswith("assistant\n")
    job = client.submit(
        messages=[QUESTION],
        params=SamplingParams(temperature=0.0, max_tokens=1),
        return_prompt_token_ids=True,
    )
    assert job.result(timeout_s=120).prompt_token_ids == tokens.token_ids


def test_an_open_message_is_gone_on_with(client) -> None:
    turns = [QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert client.tokenize(messages=turns, timeout_s=120, **options).text.endswith("France is")
    job = client.submit(
        messages=turns, params=SamplingParams(temperature=0.0, max_tokens=2), **options
    )
    assert "Paris" in job.result(timeout_s=120).text


def test_a_bad_conversation_is_the_requests_fault(client) -> None:
    with pytest.raises(JobFailed) as caught:
        client.tokenize([10**6], timeout_s=120)
    assert (caught.value.info.code, caught.value.info.field) == (
        "invalid_request",
        "prompt_token_ids",
    )
    with pytest.raises(InvalidRequestError):
        client.tokenize(messages=[], timeout_s=120)


def test_a_worker_that_is_full_still_tokenizes(client) -> None:
    params = SamplingParams(max_tokens=1000, ignore_eos=True, seed=1)
    running, waiting = client.submit("Count:", params), client.submit("Count:", params)
    stream = running.stream(timeout_s=120)
    next(stream)
    tokens = client.tokenize(TEXT * 100, timeout_s=120)
    assert tokens.text == TEXT * 100
    assert running.status().state is JobState.RUNNING
    assert waiting.status().state is JobState.QUEUED
    for job in (waiting, running):
        job.cancel()
    stream.close()


def test_a_prompt_beyond_the_context_is_tokenized_all_the_same(client) -> None:
    assert len(client.tokenize("word " * 5000, timeout_s=120).token_ids) > 4096


def test_log_probabilities_come_with_the_bytes_of_all_tokens_that_they_name(client) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    result = client.submit(TEXT, params).result(timeout_s=120)
    named = {*result.token_ids, *(result.prompt_token_ids or ())}
    for entry in (*(result.logprobs or ()), *(result.prompt_logprobs or ())):
        named |= {token_id for token_id, _ in (entry.top if entry else ())}
    assert set(result.token_texts) == named
    prompt = b"".join(result.token_texts[i] for i in result.prompt_token_ids or ())
    assert prompt == TEXT.encode()


def test_the_whole_vocabulary_comes_with_its_bytes(client) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=-1)
    result = client.submit("Hello", params).result(timeout_s=120)
    assert len(result.token_texts) == 49_152
    assert result.token_texts[result.token_ids[0]].decode() in result.text
