"""Batches from their input to their files: every line ends once."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from inferq.producer.batches.records import BatchRecord, Status
from inferq.producer.batches.store import BatchStore
from inferq.protocol.keys import Lane, QueueKeys

#: Generous: the machine may be busy.
TIMEOUT_S = 90


async def ended(store: BatchStore, batch: BatchRecord) -> BatchRecord:
    found = await store.batch(batch.id)
    assert found is not None
    return found


async def test_each_line_ends_in_the_output_or_the_error_file(
    make_batch: Any, run_turn: Any, read_lines: Any, store: BatchStore, line_of: Any,
    start_stand_in: Any,
) -> None:  # fmt: skip
    start_stand_in().say("Hello there")
    lines: list[Any] = [line_of(f"line-{k}") for k in range(20)]
    bad: list[Any] = [
        b"{not json",
        b"\xff\xfe",
        b'{"custom_id": "twice"' + b" " * 2**20 + b"}",
        {**line_of("x"), "custom_id": 7},
        {k: v for k, v in line_of("x").items() if k != "custom_id"},
        line_of("line-3"),
        {**line_of("get"), "method": "GET"},
        {**line_of("other"), "url": "/v1/completions"},
        {**line_of("nowhere"), "url": "/v1/embeddings"},
        {**line_of("extra"), "more": 1},
        {**line_of("bodyless"), "body": []},
        line_of("streams", stream=True),
        line_of("model", model="another"),
        line_of("unknown", no_such_field=1),
        line_of("hot", temperature=-1),
        line_of("lane", service_tier="priority"),
    ]
    batch = await make_batch([*lines[:10], *bad, b"", b"   ", *lines[10:]], metadata={"a": "b"})
    await run_turn()
    done = await ended(store, batch)
    assert done.status is Status.COMPLETED
    assert (done.counts.total, done.counts.completed, done.counts.failed) == (36, 20, 16)
    assert done.model == "stand-in"
    assert done.metadata == {"a": "b"}
    output = await read_lines(done.output_file_id)
    assert sorted(each["custom_id"] for each in output) == sorted(f"line-{k}" for k in range(20))
    assert {each["response"]["status_code"] for each in output} == {200}
    assert {each["error"] for each in output} == {None}
    errors = await read_lines(done.error_file_id)
    assert Counter(_code(each) for each in errors) == Counter(
        {
            "invalid_json_line": 2,
            "line_too_long": 1,
            "invalid_custom_id": 1,
            "missing_custom_id": 1,
            "duplicate_custom_id": 1,
            "invalid_method": 1,
            "mismatched_url": 1,
            "invalid_url": 1,
            "unknown_parameter": 2,
            "invalid_body": 1,
            "stream": 1,
            "mismatched_model": 1,
            "temperature": 1,
            "service_tier": 1,
        }
    )
    tokens = [each["response"]["body"]["usage"]["completion_tokens"] for each in output]
    assert done.counts.completion_tokens == sum(tokens)


def _code(entry: dict[str, Any]) -> str:
    """What a line is refused for: its own code, or what the answer's error names."""
    if entry["error"] is not None:
        assert entry["response"] is None
        return str(entry["error"]["code"])
    assert entry["response"]["status_code"] == 400
    error = entry["response"]["body"]["error"]
    return str(error["code"] or error["param"])


async def test_a_file_may_be_as_editors_of_all_kinds_write_it(
    make_batch: Any, run_turn: Any, read_lines: Any, store: BatchStore, line_of: Any,
    start_stand_in: Any,
) -> None:  # fmt: skip
    start_stand_in().say("Hello there")
    rows = [json.dumps(line_of(name)).encode() for name in "abc"]
    batch = await make_batch(b"\xef\xbb\xbf" + b"\r\n\r\n".join(rows))
    await run_turn()
    done = await ended(store, batch)
    assert (done.counts.completed, done.counts.failed) == (3, 0)
    assert {each["custom_id"] for each in await read_lines(done.output_file_id)} == set("abc")
    assert done.error_file_id is None


async def test_an_answer_is_the_gateways_for_the_same_body(
    make_batch: Any, run_turn: Any, read_lines: Any, store: BatchStore, line_of: Any,
    start_stand_in: Any, start_gateway: Any,
) -> None:  # fmt: skip
    start_stand_in().say("Hello there, you")
    gateway = start_gateway()
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    lines = [
        line_of("plain"),
        line_of("several", n=2, logprobs=True, top_logprobs=2),
        line_of("tools", tools=[tool]),
        line_of("ids", return_token_ids=True, metadata={"a": "b"}),
        line_of("bad", max_tokens=-1),
        line_of("long", max_tokens=10**6),
        line_of("form", response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
    ]
    batch = await make_batch(lines)
    await run_turn()
    done = await ended(store, batch)
    answers = await read_lines(done.output_file_id) + await read_lines(done.error_file_id)
    found = {each["custom_id"]: each["response"] for each in answers}
    assert len(found) == len(lines)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        for line in lines:
            asked = await http.post(line["url"], json=line["body"])
            response = found[line["custom_id"]]
            assert response["status_code"] == asked.status_code, line["custom_id"]
            assert _without_ids(response["body"]) == _without_ids(asked.json())


def _without_ids(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("id", "created")}


async def test_completions_with_several_prompts_and_echo_are_answered_too(
    make_batch: Any, run_turn: Any, read_lines: Any, store: BatchStore, start_stand_in: Any,
    start_gateway: Any,
) -> None:  # fmt: skip
    start_stand_in()
    gateway = start_gateway()
    url = "/v1/completions"
    for prompt in (["One", "Two"], [[1, 2]]):
        body = {"model": "stand-in", "prompt": prompt, "n": 2, "echo": True, "seed": 3}
        line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        batch = await make_batch([line], endpoint=url)
        await run_turn()
        [answer] = await read_lines((await ended(store, batch)).output_file_id)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            asked = (await http.post(url, json=body)).json()
        assert len(asked["choices"]) == 2 * len(prompt)
        assert _without_ids(answer["response"]["body"]) == _without_ids(asked)


async def test_what_a_worker_refuses_is_an_error_line(
    make_batch: Any, run_turn: Any, read_lines: Any, store: BatchStore, line_of: Any,
    start_stand_in: Any,
) -> None:  # fmt: skip
    start_stand_in()
    batch = await make_batch([line_of("a", model="another"), line_of("b", model="another")])
    await run_turn()
    done = await ended(store, batch)
    assert done.output_file_id is None
    responses = [each["response"] for each in await read_lines(done.error_file_id)]
    assert [each["status_code"] for each in responses] == [404, 404]
    assert responses[0]["body"]["error"]["code"] == "model_not_found"


async def test_jobs_go_by_the_low_lane_in_a_window_and_are_forgotten_afterwards(
    make_batch: Any, run_turn: Any, store: BatchStore, line_of: Any, queue: str,
    start_stand_in: Any, valkey_client: Redis,
) -> None:  # fmt: skip
    batch = await make_batch([line_of(f"line-{k}") for k in range(12)])
    turn = asyncio.create_task(run_turn(window=5))
    keys = QueueKeys(queue)
    await until(lambda: valkey_client.xlen(keys.jobs(Lane.LOW)), 5)
    start_stand_in().say("Hello there")
    await turn
    done = await ended(store, batch)
    assert done.counts.completed == 12
    left = [key async for key in valkey_client.scan_iter(f"{keys.prefix}out:*")]
    await until(lambda: _count(valkey_client, left), 0)


async def _count(client: Redis, keys: list[bytes]) -> int:
    return int(await client.exists(*keys)) if keys else 0


async def until(look: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    """Wait until what is looked at is as wanted."""
    give_up = time.monotonic() + TIMEOUT_S
    while await look() != wanted:
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)


async def until_completed(store: BatchStore, batch: BatchRecord, number: int) -> BatchRecord:
    """Wait until so many lines are seen to be completed."""
    give_up = time.monotonic() + TIMEOUT_S
    while (found := await ended(store, batch)).counts.completed < number:
        assert time.monotonic() < give_up
        await asyncio.sleep(0.02)
    return found


async def test_a_full_queue_is_waited_for(
    make_batch: Any, run_turn: Any, store: BatchStore, line_of: Any, queue: str,
    start_stand_in: Any, valkey_url: str, read_lines: Any,
) -> None:  # fmt: skip
    batch = await make_batch([line_of(f"line-{k}") for k in range(20)])
    start_stand_in().say("Hello there")
    await run_turn(queue_limit=2)
    done = await ended(store, batch)
    assert (done.counts.completed, done.counts.failed) == (20, 0)
    assert len(await read_lines(done.output_file_id)) == 20


async def test_how_far_it_is_can_be_seen_while_it_runs(
    make_batch: Any, run_turn: Any, store: BatchStore, line_of: Any, start_stand_in: Any
) -> None:
    worker = start_stand_in(step_s=0.05)
    worker.say("Hello there")
    slow = line_of("slow", max_tokens=4000, ignore_eos=True)
    batch = await make_batch([*(line_of(f"line-{k}") for k in range(10)), slow])
    turn = asyncio.create_task(run_turn(lease_s=4))
    found = await until_completed(store, batch, 10)
    assert found.status is Status.IN_PROGRESS
    assert found.counts.total == 11
    assert found.in_progress_at is not None
    await store.request_cancel(batch.id)
    await turn


async def test_a_cancelled_batch_keeps_what_was_answered(
    make_batch: Any, run_turn: Any, store: BatchStore, line_of: Any, start_stand_in: Any,
    read_lines: Any,
) -> None:  # fmt: skip
    worker = start_stand_in(step_s=0.05)
    worker.say("Hello there")
    slow = [line_of(f"slow-{k}", max_tokens=4000, ignore_eos=True) for k in range(40)]
    batch = await make_batch([line_of("quick"), *slow])
    turn = asyncio.create_task(run_turn(window=8, lease_s=4))
    await until_completed(store, batch, 1)
    asked = await store.request_cancel(batch.id)
    assert asked is not None
    assert asked.status is Status.CANCELLING
    await turn
    done = await ended(store, batch)
    assert done.status is Status.CANCELLED
    assert done.cancelling_at is not None
    assert done.cancelled_at is not None
    assert (done.counts.completed, done.counts.failed) == (1, 40)
    assert [each["custom_id"] for each in await read_lines(done.output_file_id)] == ["quick"]
    errors = await read_lines(done.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert len({each["custom_id"] for each in errors}) == 40
    assert worker.engine.aborted


async def test_a_batch_whose_window_passes_ends_with_what_was_answered(
    make_batch: Any, run_turn: Any, store: BatchStore, line_of: Any, start_stand_in: Any,
    read_lines: Any,
) -> None:  # fmt: skip
    start_stand_in(step_s=0.05).say("Hello there")
    slow = [line_of(f"slow-{k}", max_tokens=4000, ignore_eos=True) for k in range(30)]
    batch = await make_batch([line_of("quick"), *slow], seconds=4)
    await run_turn(window=8)
    done = await ended(store, batch)
    assert done.status is Status.EXPIRED
    assert done.expired_at is not None
    assert done.expired_at >= batch.expires_at
    assert done.counts.completed + done.counts.failed == 31
    errors = await read_lines(done.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    output = await read_lines(done.output_file_id)
    assert len({each["custom_id"] for each in [*output, *errors]}) == 31


async def test_without_a_worker_a_batch_ends_when_its_window_passes(
    make_batch: Any, run_turn: Any, store: BatchStore, line_of: Any, read_lines: Any
) -> None:
    batch = await make_batch([line_of(name) for name in "abc"], seconds=1)
    await run_turn()
    done = await ended(store, batch)
    assert (done.status, done.counts.failed) == (Status.EXPIRED, 3)
    assert len(await read_lines(done.error_file_id)) == 3


@pytest.mark.parametrize(
    ("data", "terms", "code"),
    [
        (b"\n\n", {}, "empty_file"),
        (b"{}\n" * 50_001, {}, "too_many_lines"),
        (None, {"allowed_models": ("other",)}, "model_not_allowed"),
    ],
)
async def test_a_file_that_can_be_no_batch_fails_as_a_whole(
    make_batch: Any, run_turn: Any, store: BatchStore, line_of: Any, data: bytes | None,
    terms: dict[str, Any], code: str,
) -> None:  # fmt: skip
    batch = await make_batch([line_of("a")] if data is None else data, terms=terms)
    await run_turn()
    done = await ended(store, batch)
    assert done.status is Status.FAILED
    assert done.failed_at is not None
    assert [fault.code for fault in done.errors] == [code]
    assert done.output_file_id is None
    assert done.error_file_id is None


async def test_a_line_of_several_prompts_gets_through_a_queue_that_is_shorter(
    make_batch: Any, run_turn: Any, store: BatchStore, start_stand_in: Any, read_lines: Any
) -> None:
    worker = start_stand_in()
    worker.say("Hello there")
    body = {"model": "stand-in", "prompt": [f"prompt {k}" for k in range(7)], "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    batch = await make_batch([line], endpoint="/v1/completions")
    await run_turn(queue_limit=2)
    [answer] = await read_lines((await ended(store, batch)).output_file_id)
    choices = answer["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == list(range(7))
    assert len(worker.engine.requests) == 7
