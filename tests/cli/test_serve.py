"""`inferq serve`: one command brings everything up, and however it ends nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from inferq.cli.serve import how_it_ended

Serve = subprocess.Popen[str]
Start = Callable[..., Serve]
Leftovers = Any  # of conftest

KEY = "sk-serve-test"
#: Long enough for a model's load beside other tests.
READY_TIMEOUT_S = 120


@pytest.fixture
def start(smollm2: Path, tmp_path: Path, leftovers: Leftovers) -> Iterator[Start]:
    """Start it on the small model and a free port; works and keeps its files in `tmp_path`."""
    started: list[Serve] = []

    def call(*flags: str, **environment: str) -> Serve:
        command = [sys.executable, "-P", "-m", "inferq", "serve", str(smollm2), *flags]
        if "--port" not in flags:
            command += ["--port", "0"]
        started.append(
            subprocess.Popen(
                [*command, "--num-kv-blocks", "64", "--max-model-len", "256"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env={**os.environ, "TMPDIR": str(tmp_path), **environment},
            )
        )
        return started[-1]

    yield call
    for process in started:
        process.kill()
        leftovers.kill()
        process.communicate(timeout=10)


def address_of(serve: Serve) -> str:
    """Wait until it is ready; return where it said that its API is."""
    assert serve.stdout is not None
    for line in serve.stdout:
        if found := re.search(r"API +(http://\S+)/v1", line):
            return found[1]
    pytest.fail(f"it ended without an address: {serve.communicate()[1]}")


def complete(address: str, model: str, **headers: str) -> dict[str, Any]:
    body = json.dumps(
        {"model": model, "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
    ).encode()
    request = urllib.request.Request(
        f"{address}/v1/completions", body, {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


@pytest.mark.model
@pytest.mark.timeout(2 * READY_TIMEOUT_S)
def test_it_answers_whoever_has_the_key_and_a_ctrl_c_takes_all_down(
    start: Start, leftovers: Leftovers
) -> None:
    # a proxy of the environment is not for what runs here
    proxies = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    serve = start("--served-model-name", "small", INFERQ_API_KEY=KEY, **proxies)
    address = address_of(serve)

    answer = complete(address, "small", Authorization=f"Bearer {KEY}")
    assert answer["usage"]["completion_tokens"] == 4
    with pytest.raises(urllib.error.HTTPError, match="401"):
        complete(address, "small")
    for process in leftovers.processes():
        assert KEY.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()
        if process != serve.pid:
            assert KEY.encode() not in Path(f"/proc/{process}/environ").read_bytes()

    serve.send_signal(signal.SIGINT)
    _, errors = serve.communicate(timeout=40)
    assert serve.returncode == 0
    assert "Traceback" not in errors
    leftovers.check_there_are_none()


@pytest.mark.model
@pytest.mark.timeout(2 * READY_TIMEOUT_S)
def test_nothing_outlives_it_when_it_is_killed(start: Start, leftovers: Leftovers) -> None:
    serve = start(INFERQ_API_KEY=KEY)
    address_of(serve)
    # the server, the gateway, the worker, its engine, and a watchdog each
    assert len(leftovers.processes()) >= 8
    serve.kill()
    leftovers.check_there_are_none(timeout_s=20)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(3 * READY_TIMEOUT_S)
def test_with_a_storage_it_runs_batches_too(
    start: Start, leftovers: Leftovers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    storage = tmp_path_factory.mktemp("storage")
    serve = start("--served-model-name", "small", "--batch-storage", str(storage))
    body = {"model": "small", "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    with openai.OpenAI(base_url=f"{address_of(serve)}/v1", api_key="none") as client:
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        give_up = time.monotonic() + READY_TIMEOUT_S
        while batch.status not in ("completed", "failed"):
            assert time.monotonic() < give_up
            time.sleep(0.1)
            batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        answer = json.loads(client.files.content(batch.output_file_id).read())
    assert answer["response"]["body"]["usage"]["completion_tokens"] == 4
    serve.send_signal(signal.SIGINT)
    serve.communicate(timeout=60)
    assert serve.returncode == 0
    leftovers.check_there_are_none()


@pytest.mark.model
@pytest.mark.timeout(2 * READY_TIMEOUT_S)
def test_the_end_of_a_part_takes_the_others_down(start: Start, leftovers: Leftovers) -> None:
    serve = start()
    address_of(serve)
    [gateway] = [
        process
        for process in leftovers.processes()
        if b"\0gateway\0" in Path(f"/proc/{process}/cmdline").read_bytes()
    ]
    os.kill(gateway, signal.SIGKILL)
    _, errors = serve.communicate(timeout=40)
    assert serve.returncode == 1
    assert "the gateway process was killed by SIGKILL (by someone, or by Linux" in errors
    leftovers.check_there_are_none()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (2, "ended with exit code 2; its lines say why"),
        (-9, "was killed by SIGKILL (by someone, or by Linux when memory ran out)"),
        (-11, "was killed by SIGSEGV"),
        (-60, "was killed by signal 60"),
    ],
)
def test_an_end_is_told_by_its_signal(code: int, said: str) -> None:
    assert how_it_ended(code) == said


@pytest.mark.model
def test_a_port_that_is_taken_ends_it_as_a_bad_setting(start: Start, leftovers: Leftovers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serve = start("--port", str(port))
        _, errors = serve.communicate(timeout=60)
    assert serve.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in errors
    leftovers.check_there_are_none()
