"""RQ performs tasks that are known by name, and nothing else that lies in its queue."""

from __future__ import annotations

import json
import pickle
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from inferq.producer.tasks.safe_rq import (
    FAILURE_TTL_S,
    SafeJob,
    SafeQueue,
    check_prefix,
    task_queue,
    task_worker,
)
from inferq.protocol.errors import InferqError
from inferq.protocol.keys import TaskKeys

# After ours: it has RQ's keys begin with our prefix.
import rq.defaults  # isort: skip
from rq.registry import FailedJobRegistry  # isort: skip


@pytest.fixture
def done() -> list[Any]:
    return []


@pytest.fixture
def tasks(plain_redis: redis.Redis, queue: str) -> SafeQueue:
    return task_queue(plain_redis, queue)


@pytest.fixture
def work(
    plain_redis: redis.Redis, queue: str, done: list[Any]
) -> Iterator[Callable[[], list[Any]]]:
    def perform() -> list[Any]:
        worker = task_worker(plain_redis, (queue,), {"note": done.append})
        with capture_logs() as lines:
            worker.work(burst=True, logging_level=None)
        return lines

    return perform


def put_raw(tasks: SafeQueue, data: bytes, **fields: Any) -> str:
    """Put a job into the queue as whoever can write to Redis may."""
    job_id = secrets.token_hex(8)
    tasks.connection.hset(
        SafeJob.key_for(job_id),
        mapping={"data": data, "origin": tasks.name, "status": "queued", **fields},
    )
    tasks.push_job_id(job_id)
    return job_id


def assert_refused(tasks: SafeQueue, job_id: str, lines: list[Any], reason: str) -> None:
    [line] = [line for line in lines if line["event"] == "task refused"]
    assert (line["log_level"], line["rq_job"]) == ("error", job_id)
    assert reason in line["reason"]
    failed = FailedJobRegistry(queue=tasks)
    assert failed.get_job_ids() == [job_id]
    assert 0 < tasks.connection.ttl(SafeJob.key_for(job_id)) <= FAILURE_TTL_S
    assert tasks.count == 0


def test_a_task_known_by_name_is_performed(tasks: SafeQueue, work: Any, done: list[Any]) -> None:
    tasks.give("note", "a")
    work()
    assert done == ["a"]
    assert tasks.count == 0
    assert FailedJobRegistry(queue=tasks).count == 0


def test_os_system_is_refused_loudly_and_harms_nothing(
    tasks: SafeQueue, work: Any, done: list[Any], tmp_path: Path
) -> None:
    harm = tmp_path / "harm"
    job_id = put_raw(tasks, json.dumps(["os.system", None, [f"touch {harm}"], {}]).encode())
    tasks.give("note", "after")
    lines = work()
    assert_refused(tasks, job_id, lines, "'os.system' is not one of note")
    assert not harm.exists()
    assert done == ["after"]


def test_a_pickle_is_not_even_read(tasks: SafeQueue, work: Any, tmp_path: Path) -> None:
    harm = tmp_path / "harm"

    class Harmful:
        def __reduce__(self) -> Any:
            return (Path.touch, (harm,))

    job_id = put_raw(tasks, pickle.dumps(("note", None, [Harmful()], {})))
    lines = work()
    assert_refused(tasks, job_id, lines, "JSON")
    assert not harm.exists()


@pytest.mark.parametrize(
    "field",
    [
        "success_callback_name",
        "failure_callback_name",
        "stopped_callback_name",
        "webhooks",
        "retries_left",
        "repeats_left",
        "dependency_ids",
        "rate_limit_key",
    ],
)
def test_what_rq_would_call_or_repeat_besides_is_refused(
    field: str, tasks: SafeQueue, work: Any, done: list[Any], receiver: Any
) -> None:
    hook = json.dumps([{"url": receiver.url, "job_status": "failed"}])
    value = {"webhooks": hook, "retries_left": "9", "repeats_left": "9"}.get(field, "os.getcwd")
    job_id = put_raw(tasks, b'["note", null, ["x"], {}]', **{field: value})
    lines = work()
    assert_refused(tasks, job_id, lines, field)
    assert done == []
    assert receiver.got == []


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (b'["upper", "text", [], {}]', {}),
        (b'[["note"], null, [], {}]', {}),
        (b"[null, null, [], {}]", {}),
        (b'["note", null, ["x"], {}]', {"timeout": "soon"}),
        (b'["note", null, ["x"], {}]', {"created_at": "never"}),
    ],
)
def test_a_malformed_job_is_refused_and_the_worker_goes_on(
    data: bytes, fields: dict[str, str], tasks: SafeQueue, work: Any, done: list[Any]
) -> None:
    job_id = put_raw(tasks, data, **fields)
    tasks.give("note", "after")
    assert_refused(tasks, job_id, work(), "")
    assert done == ["after"]


def test_a_task_that_fails_is_logged_and_kept(
    tasks: SafeQueue, plain_redis: redis.Redis, queue: str
) -> None:
    def fail(_: str) -> None:
        raise ValueError("on purpose")

    tasks.give("fail", "x")
    worker = task_worker(plain_redis, (queue,), {"fail": fail})
    with capture_logs() as lines:
        worker.work(burst=True, logging_level=None)
    [line] = [line for line in lines if line["event"] == "task failed"]
    assert line["task"] == "fail"
    [job_id] = FailedJobRegistry(queue=tasks).get_job_ids()
    assert job_id == line["rq_job"]
    assert 0 < plain_redis.ttl(SafeJob.key_for(job_id)) <= FAILURE_TTL_S


def test_all_of_rqs_keys_share_our_prefix_and_hash_tag(
    tasks: SafeQueue, work: Any, plain_redis: redis.Redis, queue: str
) -> None:
    assert rq.defaults.RQ_KEY_PREFIX == TaskKeys.RQ_PREFIX == "inferq:{tasks}:rq"
    tasks.give("note", "a")
    put_raw(tasks, b"[]")
    work()
    keys = [key.decode() for key in plain_redis.keys("*")]
    assert any(queue in key for key in keys)
    assert [key for key in keys if not key.startswith("inferq:{")] == []


def test_an_rq_that_was_imported_with_another_prefix_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rq.defaults, "RQ_KEY_PREFIX", "rq")
    with pytest.raises(InferqError, match="before rq"):
        check_prefix()
