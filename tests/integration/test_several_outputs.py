"""Several outputs of one job, offline and through the queue, also when its worker dies."""

from __future__ import annotations

import json
import time

import pytest
import redis

from inferq import LLM, JobCancelled, JobFailed, SamplingParams, StructuredOutputs
from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import Event

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

QUEUE = "several-outputs"
PROMPT = "The three best things about the sea are"
THREE = SamplingParams(n=3, seed=7, max_tokens=40, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def llm(smollm2) -> LLM:
    return LLM(str(smollm2), max_model_len=1024, num_kv_blocks=256)


@pytest.fixture(scope="module")
def generate(llm):
    def run(prompt, **options):
        [output] = llm.generate(prompt, SamplingParams(**options), use_tqdm=False)
        assert output.finished
        assert output.error is None
        return output

    return run


@pytest.fixture(scope="module")
def worker(start_worker, valkey_url: str):
    return start_worker(valkey_url, QUEUE, num_kv_blocks=256)


@pytest.fixture
def client(worker, connect, valkey_url: str):
    return connect(valkey_url, QUEUE)


def outputs_of(result) -> list[tuple]:
    return [
        (o.index, o.text, list(o.token_ids), str(o.finish_reason), o.stop_reason)
        for o in result.outputs
    ]


CASES = {
    "n": {"n": 3, "seed": 7, "max_tokens": 16},
    "n-stop": {"n": 3, "seed": 7, "max_tokens": 24, "stop": [".", ","], "logprobs": 1},
    "best_of": {"n": 2, "best_of": 4, "seed": 7, "max_tokens": 16, "stop": ["."]},
    "beams": {"n": 2, "beam_width": 4, "max_tokens": 12},
    "beams-stop": {"n": 2, "beam_width": 3, "max_tokens": 12, "stop": ["sea"]},
    "penalties": {
        "temperature": 0.0,
        "max_tokens": 12,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "bad_words": ["sea"],
        "logit_bias": {30: 2.0},
    },
    "allowed": {"seed": 1, "max_tokens": 8, "allowed_token_ids": [30, 31, 32, 33]},
    "choice": {"seed": 1, "structured_outputs": StructuredOutputs(choice=["red", "green"])},
    "regex": {
        "n": 2,
        "seed": 3,
        "structured_outputs": StructuredOutputs(regex="[0-9]{4}-[0-9]{2}"),
    },
    "truncated": {"temperature": 0.0, "max_tokens": 6, "truncate_prompt_tokens": 3},
    "no-text": {"temperature": 0.0, "max_tokens": 6, "detokenize": False},
    "prompt-logprobs": {"temperature": 0.0, "max_tokens": 2, "prompt_logprobs": 2},
    "all-logprobs": {"temperature": 0.0, "max_tokens": 3, "logprobs": -1},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_queue_returns_what_the_offline_class_does(client, generate, options) -> None:
    expected = generate(PROMPT, **options)
    result = client.submit(PROMPT, SamplingParams(**options)).result(timeout_s=120)
    assert outputs_of(result) == outputs_of(expected)
    count = sum(len(o.token_ids) for o in result.outputs)
    assert result.usage.completion_tokens == count
    assert result.usage.prompt_tokens == len(expected.prompt_token_ids)
    for mine, theirs in zip(result.outputs, expected.outputs, strict=True):
        assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
        if mine.logprobs is not None:
            values = [lp.logprob for lp in mine.logprobs]
            assert mine.cumulative_logprob == pytest.approx(sum(values))
            assert len(values) == len(mine.token_ids)


def test_every_streamed_output_has_its_own_end_and_the_job_one(client) -> None:
    job = client.submit(PROMPT, THREE)
    events = list(job.stream(timeout_s=60))
    assert {e.index for e in events} == {0, 1, 2}
    for index in range(3):
        own = [e for e in events if e.index == index]
        offsets = [o for e in own for o in range(e.offset, e.offset + len(e.token_ids))]
        assert offsets == list(range(40))
        assert [e.finish_reason for e in own][-1] == "length"
        assert [e.finish_reason is not None for e in own].count(True) == 1
    assert [e.usage is not None for e in events].count(True) == 1
    assert events[-1].next_offset == 120
    # from any total: what follows it, whatever output it belongs to
    tokens = [(e.index, e.offset + i, t) for e in events for i, t in enumerate(e.token_ids)]
    for start in (1, 17, 90, 119, 120):
        again = list(job.stream(start, timeout_s=60))
        seen = [(e.index, e.offset + i, t) for e in again for i, t in enumerate(e.token_ids)]
        assert seen == tokens[start:]
        assert again[-1].usage is not None


def test_outputs_differ_and_the_same_seed_gives_the_same(client) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8)
    first, second = (client.submit(PROMPT, params).result(timeout_s=60) for _ in range(2))
    assert outputs_of(first) == outputs_of(second)
    assert len({o.token_ids for o in first.outputs}) == 3


def test_three_outputs_of_a_killed_worker_go_on_as_undisturbed(
    start_worker, connect, valkey_url: str, queue: str, generate
) -> None:
    options = {"n": 3, "seed": 7, "max_tokens": 200, "ignore_eos": True, "logprobs": 0}
    # the first output ends before the kill: it is not generated again
    expected = generate(PROMPT, **options, stop=["amazing"])
    assert len(expected.outputs[0].token_ids) < 10
    workers = {w.name: w for w in [start_worker(valkey_url, queue) for _ in range(2)]}
    client = connect(valkey_url, queue)
    job = client.submit(PROMPT, SamplingParams(**options, stop=["amazing"]))
    events, killed = [], False
    for event in job.stream(timeout_s=60):
        events.append(event)
        if not killed and event.next_offset >= 30:
            killed = True
            with redis.Redis.from_url(valkey_url) as raw:
                owner = raw.hget(QueueKeys(queue).job(job.id), "owner").decode()
            workers.pop(owner).kill()
    assert killed
    totals = [e.next_offset for e in events]
    assert totals == sorted(totals)
    result = job.result(timeout_s=10)
    assert outputs_of(result) == outputs_of(expected)
    assert result.attempts == 2
    for index, output in enumerate(result.outputs):
        own = [e for e in events if e.index == index]
        assert [t for e in own for t in e.token_ids] == list(output.token_ids)
        assert "".join(e.text for e in own) == output.text
        assert output.cumulative_logprob == pytest.approx(sum(lp.logprob for lp in output.logprobs))
    [survivor] = workers.values()
    assert survivor.stop() == 0


def test_what_publishes_at_its_end_starts_again_after_a_kill(
    start_worker, connect, valkey_url: str, queue: str, generate
) -> None:
    options = {"n": 2, "best_of": 3, "seed": 5, "max_tokens": 200, "ignore_eos": True}
    expected = generate(PROMPT, **options)
    first = start_worker(valkey_url, queue)
    client = connect(valkey_url, queue)
    job = client.submit(PROMPT, SamplingParams(**options))
    while job.status().state != "running":
        time.sleep(0.02)
    time.sleep(0.3)
    first.kill()
    start_worker(valkey_url, queue)
    result = job.result(timeout_s=60)
    assert outputs_of(result) == outputs_of(expected)
    assert result.attempts == 2


def test_a_cancelled_job_of_several_outputs_ends_once(client, valkey_url: str) -> None:
    job = client.submit(PROMPT, SamplingParams(n=4, seed=1, max_tokens=400, ignore_eos=True))
    stream = job.stream(timeout_s=60)
    next(stream)
    job.cancel()
    with pytest.raises(JobCancelled):
        list(stream)
    with redis.Redis.from_url(valkey_url) as raw:
        entries = raw.xrange(QueueKeys(QUEUE).out(job.id))
    events = [Event.decode(fields[b"e"]) for _, fields in entries]
    assert [e.terminal is not None for e in events].count(True) == 1
    assert events[-1].terminal is not None
    assert events[-1].terminal.usage.completion_tokens == sum(len(e.token_ids) for e in events)
    # its four places are free again
    assert client.submit("x", SamplingParams(max_tokens=1)).result(timeout_s=30).token_ids


def test_a_job_larger_than_the_pool_runs_alone(
    start_worker, connect, valkey_url: str, queue: str
) -> None:
    worker = start_worker(valkey_url, queue, num_kv_blocks=12, max_model_len=128)
    client = connect(valkey_url, queue)
    small = SamplingParams(max_tokens=4, seed=1)
    # 4 x (10 + 50) tokens are more than 192
    large = SamplingParams(n=4, seed=1, max_tokens=50, ignore_eos=True)
    jobs = [client.submit([1] * 10, p) for p in (small, large, small)]
    results = [job.result(timeout_s=120) for job in jobs]
    assert [len(r.outputs) for r in results] == [1, 4, 1]
    assert results[1].usage.completion_tokens == 200
    assert worker.stop() == 0


def test_scores_alone_have_an_entry_for_each_prompt_token(client, generate) -> None:
    options = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 2}
    expected = generate(PROMPT, **options)
    result = client.submit(PROMPT, SamplingParams(**options)).result(timeout_s=60)
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == result.usage.prompt_tokens
    assert result.prompt_logprobs[0] is None
    assert expected.prompt_logprobs[0] is None
    for token_id, mine, theirs in zip(
        expected.prompt_token_ids[1:],
        result.prompt_logprobs[1:],
        expected.prompt_logprobs[1:],
        strict=True,
    ):
        assert mine.logprob == pytest.approx(theirs[token_id].logprob, abs=1e-3)
        assert len(mine.top) == 2


def test_prompt_logprobs_that_no_event_could_hold_are_refused(client) -> None:
    with pytest.raises(JobFailed) as caught:
        client.submit([1] * 11, SamplingParams(prompt_logprobs=-1)).result(timeout_s=60)
    assert (caught.value.info.field, caught.value.info.limit) == ("prompt_logprobs", "10")
    few = client.submit([1, 2, 3], SamplingParams(prompt_logprobs=-1, max_tokens=1))
    scores = few.result(timeout_s=60).prompt_logprobs
    assert [0 if s is None else len(s.top) for s in scores] == [0, 49_152, 49_152]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"structured_outputs": {"regex": "[0-"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"logit_bias": {191_222: 5}}, "logit_bias"),
        ({"allowed_token_ids": [999_999]}, "allowed_token_ids"),
    ],
)
def test_what_the_model_cannot_serve_is_named(client, llm, options, field) -> None:
    from inferq import InvalidRequestError

    params = SamplingParams(**options)
    with pytest.raises(JobFailed) as caught:
        client.submit("x", params).result(timeout_s=60)
    assert caught.value.info.field == field
    with pytest.raises(InvalidRequestError) as refused:
        llm.generate("x", params, use_tqdm=False)
    assert refused.value.field == field


def test_a_form_is_kept_through_the_queue(client) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        n=3, seed=2, max_tokens=80, structured_outputs=StructuredOutputs(json=schema)
    )
    result = client.submit("A person:", params).result(timeout_s=60)
    for output in result.outputs:
        if output.finish_reason == "stop":
            assert set(json.loads(output.text)) == {"name", "age"}
    assert any(o.finish_reason == "stop" for o in result.outputs)


def test_a_cache_salt_keeps_caches_apart(client) -> None:
    prompt = [7] * 64
    params = SamplingParams(max_tokens=1, temperature=0.0)

    def cached(salt: str | None) -> int:
        job = client.submit(prompt, params, cache_salt=salt)
        return job.result(timeout_s=60).usage.cached_tokens

    assert [cached(s) for s in ("a", "b", None)] == [0, 0, 0]
    assert all(cached(s) >= 48 for s in ("a", "b", None))


def test_the_worker_reports_its_prefix_hits(client) -> None:
    for _ in range(2):
        client.submit([9] * 64, SamplingParams(max_tokens=1)).result(timeout_s=60)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        [info] = client.workers()
        if info.prefix_hit_tokens:
            break
        time.sleep(0.2)
    assert 0 < info.prefix_hit_tokens < info.prefix_query_tokens


def test_offline_salts_priorities_and_resets(llm: LLM) -> None:
    one = SamplingParams(max_tokens=1, temperature=0.0)
    llm.reset_prefix_cache()

    def cached(**more) -> int:
        prompt = {"prompt_token_ids": [11] * 64, **more}
        [output] = llm.generate([prompt], one, use_tqdm=False, priority=[2])
        return output.num_cached_tokens

    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [0, 0, 0]
    assert cached(cache_salt="a") >= 48
    assert llm.reset_prefix_cache()
    assert cached(cache_salt="a") == 0
    assert 0 < llm.stats().prefix_hit_rate < 1


@pytest.mark.parametrize("prompts", ["", [""], {"prompt": ""}])
def test_an_empty_prompt_is_the_begin_token_alone(llm: LLM, prompts) -> None:
    [output] = llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.prompt == ""
    assert output.prompt_token_ids == [llm.get_tokenizer().bos_token_id]
    assert output.outputs[0].token_ids
