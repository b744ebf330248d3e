"""A worker dies, stalls, drains or is full: the stream stays one, and nothing is lost."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter

import pytest
import redis

from inferq import SamplingParams
from inferq.protocol.keys import GROUP, Lane, QueueKeys

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

PROMPT = "Write a long story about a lighthouse."
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)


def _owner(client, keys: QueueKeys, job_id: str) -> str:
    return client.hget(keys.job(job_id), "owner").decode()


@pytest.fixture(scope="module")
def undisturbed(smollm2):
    from inferq import LLM

    llm = LLM(str(smollm2), max_model_len=1024, num_kv_blocks=512)
    [output] = llm.generate(PROMPT, LONG, use_tqdm=False)
    return output.outputs[0]


@pytest.mark.parametrize("after", [1, 40])
def test_a_killed_worker_leaves_one_contiguous_stream_and_the_undisturbed_text(
    start_worker, connect, valkey_url: str, queue: str, undisturbed, after: int
) -> None:
    workers = {w.name: w for w in [start_worker(valkey_url, queue) for _ in range(2)]}
    client = connect(valkey_url, queue)
    job = client.submit(PROMPT, LONG)
    offsets: list[int] = []
    tokens: list[int] = []
    text = ""
    killed = False
    for event in job.stream(timeout_s=60):
        offsets.extend(range(event.offset, event.offset + len(event.token_ids)))
        tokens.extend(event.token_ids)
        text += event.text
        if not killed and len(tokens) >= after:
            killed = True

            with redis.Redis.from_url(valkey_url) as raw:
                workers.pop(_owner(raw, QueueKeys(queue), job.id)).kill()
    assert killed
    assert offsets == list(range(LONG.max_tokens))
    assert tokens == undisturbed.token_ids
    assert text == undisturbed.text
    assert job.result(timeout_s=5).attempts == 2
    [survivor] = workers.values()
    assert survivor.stop() == 0


def test_a_stalled_worker_that_returns_publishes_nothing_more(
    start_worker, connect, valkey_url: str, queue: str, undisturbed
) -> None:
    first = start_worker(valkey_url, queue)
    client = connect(valkey_url, queue)
    job = client.submit(PROMPT, LONG)
    stream = job.stream(timeout_s=60)
    seen = [next(stream)]
    first.signal(signal.SIGSTOP)
    second = start_worker(valkey_url, queue)
    time.sleep(5.5)  # longer than a lease
    first.signal(signal.SIGCONT)
    seen.extend(stream)
    offsets = [o for e in seen for o in range(e.offset, e.offset + len(e.token_ids))]
    assert offsets == list(range(LONG.max_tokens))
    assert [t for e in seen for t in e.token_ids] == undisturbed.token_ids
    assert job.result(timeout_s=5).attempts == 2
    assert first.stop() == 0
    assert second.stop() == 0


def test_a_drained_worker_hands_over_at_its_offset_without_a_crash_counted(
    start_worker, connect, valkey_url: str, queue: str, undisturbed
) -> None:

    first = start_worker(valkey_url, queue, drain_timeout_s=0.2, lease_s=30)
    second = start_worker(valkey_url, queue, drain_timeout_s=0.2, lease_s=30)
    client = connect(valkey_url, queue)
    job = client.submit(PROMPT, LONG)
    stream = job.stream(timeout_s=60)
    seen = [next(stream)]
    with redis.Redis.from_url(valkey_url) as raw:
        owner = _owner(raw, QueueKeys(queue), job.id)
        workers = {first.name: first, second.name: second}
        leaving = workers.pop(owner)
        leaving.signal(signal.SIGTERM)
        seen.extend(stream)
        assert int(raw.hget(QueueKeys(queue).job(job.id), "crashes") or 0) == 0
    assert [t for e in seen for t in e.token_ids] == undisturbed.token_ids
    assert job.status().handoffs == 1
    assert leaving.process.wait(30) == 0
    [staying] = workers.values()
    assert staying.stop() == 0


def test_a_job_is_not_claimed_until_its_pages_fit(
    start_worker, connect, valkey_url: str, queue: str
) -> None:

    worker = start_worker(valkey_url, queue, num_kv_blocks=16, max_model_len=256, starve_s=0)
    client = connect(valkey_url, queue)
    keys = QueueKeys(queue)
    long = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    first = client.submit([1, 2, 3], long)  # 153 tokens: 10 of 16 blocks
    next(first.stream(timeout_s=60))
    second = client.submit([4, 5, 6], long)
    overlaps = Counter()
    with redis.Redis.from_url(valkey_url) as raw:
        while first.status().state == "running":
            pending = raw.xpending(keys.jobs(Lane.NORMAL), GROUP)["pending"]
            length = raw.xlen(keys.jobs(Lane.NORMAL))
            if first.status().state != "running":
                break
            overlaps[pending, length] += 1
            time.sleep(0.02)
    assert set(overlaps) == {(1, 2)}, overlaps
    assert len(second.result(timeout_s=60).token_ids) == 150
    assert len(first.result(timeout_s=5).token_ids) == 150
    assert worker.stop() == 0


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"kind": {"enum": ["cat", "dog", "owl"]}},
                "required": ["kind"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}


def test_a_nested_schema_holds_although_a_worker_dies_in_the_middle(
    start_worker, connect, valkey_url: str, queue: str
) -> None:
    workers = {w.name: w for w in [start_worker(valkey_url, queue) for _ in range(2)]}
    client = connect(valkey_url, queue)
    jobs = [
        client.submit(
            f"A person, number {i}, as JSON: ",
            SamplingParams(seed=i, max_tokens=90, structured_outputs={"json": PERSON}),
        )
        for i in range(20)
    ]
    next(jobs[-1].stream(timeout_s=60))
    with redis.Redis.from_url(valkey_url) as raw:
        running = [job for job in jobs if job.status().state == "running"]
        workers.pop(_owner(raw, QueueKeys(queue), running[0].id)).kill()
    results = [job.result(timeout_s=120) for job in jobs]
    assert max(result.attempts for result in results) == 2
    for result in results:
        assert result.finish_reason == "stop", result.text
        person = json.loads(result.text)
        assert list(person) == ["name", "age", "pets"]
        assert isinstance(person["name"], str)
        assert len(person["name"]) <= 12
        assert 0 <= person["age"] <= 120
        assert all(pet["kind"] in ("cat", "dog", "owl") for pet in person["pets"])
    [survivor] = workers.values()
    assert survivor.stop() == 0
