"""Batches from their input to their files: every line ends once."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from inferq.producer.batches.records import BatchRecord, Status
from inferq.producer.batches.store import BatchStore


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
