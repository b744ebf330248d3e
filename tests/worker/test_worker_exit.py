"""A worker's process ends when it is told to, whatever its threads are in the middle of."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hand_worker import byte_tokenizer

from inferq import Client, SamplingParams

SCRIPT = Path(__file__).parent / "blocked_worker.py"
TIMEOUT_S = 60

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run(valkey_url: str, queue: str) -> Iterator[Run]:
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        to = ("--redis-url", valkey_url, "--queue", queue)
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments, *to], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def ends_in_order(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "blocked\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 0


def test_while_its_model_is_fetched(run: Run) -> None:
    ends_in_order(run("fetch", "--model", "some/model"))


def test_while_prompts_are_tokenized(run: Run, tmp_path: Path, valkey_url: str, queue: str) -> None:
    byte_tokenizer()._fast.save(str(tmp_path / "tokenizer.json"))
    model = ("--model", str(tmp_path), "--max-model-len", "128")
    process = run("tokenize", *model, "--num-kv-blocks", "64", "--drain-timeout-s", "3600")
    with Client(valkey_url, queue) as client:
        job = client.submit("a prompt", SamplingParams(max_tokens=1))
        ends_in_order(process)
        assert job.status().state == "released"
