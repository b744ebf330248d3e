"""A batch from end to end: OpenAI's client, a gateway, `inferq tasks` and a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("no_batches")]

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "batch.py"
ANSWER = "The Seine."
TIMEOUT_S = 100


@pytest.fixture
def gateway(stand_in_worker: Any, start_gateway: Callable[..., Any], tmp_path: Path) -> Any:
    stand_in_worker.say(ANSWER)
    return start_gateway(batch_storage=str(tmp_path / "storage"))


@pytest.fixture
def start_tasks(valkey_url: str, queue: str, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Start a tasks process for the gateway's batches."""
    started: list[subprocess.Popen[bytes]] = []
    log = (tmp_path / "tasks.log").open("wb")

    def start() -> None:
        flags = ("--queues", queue, "--redis-url", valkey_url, "--workers", "1")
        storage = ("--batch-storage", str(tmp_path / "storage"), "--poll-interval-s", "0.05")
        command = [sys.executable, "-P", "-m", "inferq", "tasks", *flags, *storage]
        started.append(subprocess.Popen(command, stdout=log, stderr=log))

    yield start
    for process in started:
        process.terminate()
        process.wait(60)
    log.close()


def chat(custom_id: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Name a river."}]
    given = {"model": "stand-in", "messages": messages, "max_tokens": 20, **body}
    url = "/v1/chat/completions"
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def begin(client: openai.OpenAI, *lines: dict[str, Any], **options: Any) -> openai.types.Batch:
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines) or b"\n"
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        **options,
    )


def wait_for(
    client: openai.OpenAI, batch_id: str, condition: Callable[[openai.types.Batch], bool]
) -> openai.types.Batch:
    give_up = time.monotonic() + TIMEOUT_S
    while not condition(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < give_up, batch
        time.sleep(0.05)
    return batch


def has_ended(batch: openai.types.Batch) -> bool:
    return batch.status in ("completed", "failed", "expired", "cancelled")


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).iter_lines()]


def test_a_batch_is_answered_as_the_gateway_would_have(
    openai_client: openai.OpenAI, start_tasks: Callable[[], None]
) -> None:
    good = [chat(str(number)) for number in range(5)]
    bad = [chat("bad", temperature=-1), {**chat("worse"), "method": "GET"}]
    metadata = {"customer": "7"}
    expiry = {"anchor": "created_at", "seconds": 3600}
    made = begin(openai_client, *good, *bad, metadata=metadata, output_expires_after=expiry)
    hopeless = begin(openai_client)
    start_tasks()
    batch = wait_for(openai_client, made.id, has_ended)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    counts = (batch.request_counts.total, batch.request_counts.completed)
    assert (*counts, batch.request_counts.failed) == (7, 5, 2)
    assert (batch.model, batch.metadata, batch.errors) == ("stand-in", metadata, None)
    assert batch.usage is not None
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times, key=int)  # type: ignore[arg-type]
    assert {each.id for each in openai_client.batches.list()} == {batch.id, hopeless.id}

    answered = lines_of(openai_client, batch.output_file_id)
    assert sorted(each["custom_id"] for each in answered) == list("01234")
    direct = openai_client.chat.completions.create(**good[0]["body"]).to_dict()
    for each in answered:
        assert each["response"]["status_code"] == 200
        body = each["response"]["body"]
        own = {"id", "created", "usage"}
        assert {name: body[name] for name in body.keys() - own} == {
            name: direct[name] for name in direct.keys() - own
        }
        assert body["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]  # type: ignore[index]
    failed = {each["custom_id"]: each for each in lines_of(openai_client, batch.error_file_id)}
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.chat.completions.create(**bad[0]["body"])
    assert failed["bad"]["response"]["body"] == refused.value.response.json()
    assert failed["worse"]["error"]["code"] == "invalid_method"

    failed_batch = wait_for(openai_client, hopeless.id, has_ended)
    assert (failed_batch.status, failed_batch.output_file_id) == ("failed", None)
    assert failed_batch.failed_at is not None
    assert failed_batch.errors is not None
    assert [error.code for error in failed_batch.errors.data or ()] == ["empty_file"]

    outputs = openai_client.files.list(purpose="batch_output").data
    assert {file.id for file in outputs} == {batch.output_file_id, batch.error_file_id}
    assert all(file.expires_at == file.created_at + 3600 for file in outputs)
    for file in openai_client.files.list().data:
        openai_client.files.delete(file.id)
    with pytest.raises(openai.ConflictError) as ended:
        openai_client.batches.cancel(batch.id)
    assert ended.value.code == "batch_ended"


def test_a_batch_that_is_cancelled_midway_ends_every_line(
    openai_client: openai.OpenAI, start_tasks: Callable[[], None], stand_in_worker: Any
) -> None:
    stand_in_worker.say()
    stand_in_worker.slow_down(0.05)  # they would take minutes
    names = [str(number) for number in range(10)]
    made = begin(openai_client, *(chat(name, max_tokens=4000) for name in names))
    start_tasks()
    give_up = time.monotonic() + TIMEOUT_S
    while len(stand_in_worker.engine.requests) < len(names):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    assert openai_client.batches.retrieve(made.id).status == "in_progress"
    assert openai_client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    batch = wait_for(openai_client, made.id, has_ended)
    assert (batch.status, batch.output_file_id) == ("cancelled", None)
    assert batch.cancelled_at is not None
    given_up = lines_of(openai_client, batch.error_file_id)
    assert sorted(each["custom_id"] for each in given_up) == names
    assert {each["error"]["code"] for each in given_up} == {"batch_cancelled"}


def test_the_example_runs(gateway: Any, start_tasks: Callable[[], None]) -> None:
    start_tasks()
    run = subprocess.run(
        [sys.executable, "-P", str(EXAMPLE)],
        env={**os.environ, "OPENAI_BASE_URL": f"{gateway.url}/v1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    first, *answers = run.stdout.splitlines()
    assert first.startswith("completed ")
    assert run.stderr.splitlines()[-1] == "completed: 3 of 3 answered"
    assert answers == [f"question-{number}: {ANSWER}" for number in range(3)]
