"""Prompts through the queue: real server, real worker process, real model."""

from __future__ import annotations

import time

import pytest

from inferq import InvalidRequestError, JobCancelled, JobExpired, JobFailed, SamplingParams
from inferq.protocol.keys import GROUP, Lane, QueueKeys, new_job_id

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

QUEUE = "queue-path"


@pytest.fixture(scope="module")
def worker(start_worker, valkey_url: str):
    return start_worker(valkey_url, QUEUE)


@pytest.fixture
def client(worker, connect, valkey_url: str):
    return connect(valkey_url, QUEUE)


def test_all_greedy_cases_through_the_queue_give_the_reference_tokens(client, greedy_cases) -> None:
    jobs = [
        client.submit(
            case.prompt_token_ids,
            SamplingParams(temperature=0.0, max_tokens=len(case.token_ids)),
        )
        for case in greedy_cases
    ]
    for case, job in zip(greedy_cases, jobs, strict=True):
        result = job.result(timeout_s=120)
        assert list(result.token_ids[: case.sure]) == case.token_ids[: case.sure], case.name
        if case.sure == len(case.token_ids):
            assert result.text == case.text
        assert result.usage.prompt_tokens == len(case.prompt_token_ids)
        assert result.usage.completion_tokens == len(result.token_ids)


def test_a_chat_question_streams_its_answer_in_offset_order(client) -> None:
    job = client.submit(
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        params=SamplingParams(temperature=0.0, max_tokens=16),
    )
    offsets: list[int] = []
    text = ""
    for event in job.stream(timeout_s=60):
        offsets.extend(range(event.offset, event.offset + len(event.token_ids)))
        text += event.text
    assert offsets == list(range(len(offsets)))
    assert "Paris" in text


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(client) -> None:
    def generate(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=24)
        return list(client.submit("The weather today", params).result(timeout_s=60).token_ids)

    assert generate(7) == generate(7)
    assert generate(7) != generate(8)


def test_a_stop_string_ends_the_text_before_it(client) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, stop=["GHI"])
    job = client.submit("Here is the English alphabet: ABC", params)
    result = job.result(timeout_s=60)
    assert result.text == "DEF"
    assert (result.finish_reason, result.stop_reason) == ("stop", "GHI")


def test_logprobs_travel_with_the_tokens(client) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    result = client.submit("The capital of France is", params).result(timeout_s=60)
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids)
    for token_id, entry in zip(result.token_ids, result.logprobs, strict=True):
        assert entry.top[0] == (token_id, pytest.approx(entry.logprob))
        assert entry.logprob < 0


def test_a_running_job_can_be_cancelled_and_frees_its_place(client) -> None:
    job = client.submit("Once", SamplingParams(max_tokens=900, ignore_eos=True, seed=1))
    stream = job.stream(timeout_s=60)
    assert next(stream).token_ids
    job.cancel()
    with pytest.raises(JobCancelled):
        for _ in stream:
            pass
    assert client.submit("Once", SamplingParams(max_tokens=1)).result(timeout_s=60).token_ids


def test_a_deadline_ends_a_running_job(client) -> None:
    params = SamplingParams(max_tokens=900, ignore_eos=True, seed=1)
    with pytest.raises(JobExpired):
        client.submit("Once", params, deadline_s=1.0).result(timeout_s=60)


def test_a_delayed_job_starts_when_it_is_due(client) -> None:
    submitted = time.monotonic()
    job = client.submit("Once", SamplingParams(max_tokens=1), delay_s=1.0)
    job.result(timeout_s=60)
    assert time.monotonic() - submitted >= 1.0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": "x", "model": "no-such-model"}, "model"),
        ({"prompt": [1] * 1024}, "prompt_token_ids"),
        ({"prompt": [1, 2**30]}, "prompt_token_ids"),
        ({"prompt": "x", "params": SamplingParams(stop_token_ids=[999_999])}, "stop_token_ids"),
        ({"prompt": "word " * 5000}, "prompt"),
    ],
    ids=["unknown-model", "fills-context", "id-out-of-vocabulary", "stop-id", "too-long"],
)
def test_what_only_the_worker_can_refuse_ends_in_a_typed_error(client, arguments, field) -> None:
    with pytest.raises(JobFailed) as caught:
        client.submit(**arguments).result(timeout_s=60)
    assert caught.value.info.field == field
    assert caught.value.info.message
    again = client.submit("still alive", SamplingParams(max_tokens=1)).result(timeout_s=60)
    assert len(again.token_ids) == 1


async def test_undecodable_payloads_become_dead_letters_and_the_worker_goes_on(
    client, worker, valkey_client
) -> None:
    keys = QueueKeys(QUEUE)
    for payload in (b"\xff\xfe garbage", b"\x91" * 10_000, b"\x81\xa1v\x09"):
        await valkey_client.xadd(
            keys.jobs(Lane.NORMAL), {"id": new_job_id(), "cost": 1, "job": payload}
        )
    assert client.submit("alive", SamplingParams(max_tokens=1)).result(timeout_s=60).token_ids
    assert await valkey_client.xlen(keys.jobs(Lane.NORMAL)) == 0


async def test_after_all_jobs_the_books_are_empty(client, worker, valkey_client) -> None:
    keys = QueueKeys(QUEUE)
    client.submit("last", SamplingParams(max_tokens=1)).result(timeout_s=60)
    for lane in Lane:
        assert await valkey_client.xlen(keys.jobs(lane)) == 0
        if await valkey_client.exists(keys.jobs(lane)):
            assert (await valkey_client.xpending(keys.jobs(lane), GROUP))["pending"] == 0
    assert await valkey_client.zcard(keys.leases) == 0
    counters = {
        name: int(value)
        for name, value in (await valkey_client.hgetall(keys.load)).items()
        if name in (b"queued", b"running", b"delayed", b"prompt_tokens", b"budget_tokens")
    }
    assert set(counters.values()) <= {0}
    async for key in valkey_client.scan_iter(match=f"{keys.prefix}job:*"):
        assert await valkey_client.pttl(key) > 0, key
    async for key in valkey_client.scan_iter(match=f"{keys.prefix}out:*"):
        assert await valkey_client.pttl(key) > 0, key


def test_bad_input_is_refused_before_it_is_sent(client) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.submit("x" * 10_000_000)
    assert (caught.value.field, caught.value.limit) == ("prompt", str(4 * 2**20))
