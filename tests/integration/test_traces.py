"""The trace of a job that is preempted and loses its worker, assembled from real exporters."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
_URL = re.compile(r'"url": "(http://[^"]+)"')


@pytest.fixture
def gateway_url(
    valkey_url: str, queue: str, tmp_path: Path, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A gateway process that exports to the collector, as workers started after it do."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    flags = ["--redis-url", valkey_url, "--queues", queue, "--port", "0"]
    log = tmp_path / "gateway.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "inferq", "gateway", *flags], stderr=stream
        )
    try:
        while not (served := _URL.search(log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield served[1]
    finally:
        process.terminate()
        assert process.wait(60) == 0


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "Once upon a time", "ignore_eos": True, **more}


def wait_for_model(gateway_url: str) -> str:
    while not (models := httpx.get(f"{gateway_url}/v1/models", timeout=60).json().get("data")):
        time.sleep(0.05)
    return str(models[0]["id"])


def num_prefills(spans: list[Any]) -> int:
    return sum(span.name == "prefill" and span.trace_id == TRACE for span in spans)


def test_one_trace_goes_through_a_take_over_and_a_preemption(
    gateway_url: str,
    start_worker: Callable[..., Any],
    valkey_url: str,
    queue: str,
    collector: Any,
) -> None:
    # one sequence at a time, so that an urgent job pushes another one out
    options = {"max_num_seqs": 1, "lease_s": 3.0}
    first, second = (start_worker(valkey_url, queue, wait=False, **options) for _ in range(2))
    for worker in (first, second):
        worker.wait_ready()
    second.signal(signal.SIGSTOP)  # it claims nothing until it is let
    url, model = f"{gateway_url}/v1/completions", wait_for_model(gateway_url)
    long = body(model, max_tokens=900, stream=True, service_tier="flex", temperature=0)
    urgent = body(model, max_tokens=4, service_tier="priority")
    with httpx.stream("POST", url, json=long, headers=SAMPLED, timeout=200) as answer:
        job_id = answer.headers["X-Inferq-Job-Id"]
        collector.wait_for(lambda spans: num_prefills(spans) == 1)
        first.kill()
        second.signal(signal.SIGCONT)
        collector.wait_for(lambda spans: num_prefills(spans) == 2)
        assert httpx.post(url, json=urgent, timeout=200).status_code == 200
        assert answer.read().endswith(b"data: [DONE]\n\n")
    spans = collector.wait_for(
        lambda spans: (
            {"POST /v1/completions", f"process {queue}"}
            <= {span.name for span in spans if span.trace_id == TRACE}
        )
    )
    check_tree([span for span in spans if span.trace_id == TRACE], queue, job_id)
    assert second.stop() == 0


def check_tree(spans: list[Any], queue: str, job_id: str) -> None:
    by_id = {span.span_id: span for span in spans}
    [request] = [span for span in spans if span.name == "POST /v1/completions"]
    [sent] = [span for span in spans if span.name == f"send {queue}"]
    [done] = [span for span in spans if span.name == f"process {queue}"]
    [waited] = [span for span in spans if span.name == "queue"]
    assert request.parent_id == CALLER
    assert sent.parent_id == request.span_id
    assert {done.parent_id, waited.parent_id} == {sent.span_id}
    assert done.attributes["messaging.message.id"] == job_id
    assert done.attributes["inferq.attempt"] == 2
    [taken] = [told for name, told in done.events if name == "taken over"]
    assert (taken["inferq.attempt"], taken["inferq.offset"] > 0) == (2, True)
    # of the worker that was killed, what had ended by then
    lost = [span for span in spans if span.parent_id not in (*by_id, CALLER)]
    assert {span.name for span in lost} == {"tokenize", "prefill"}
    assert len({span.parent_id for span in lost}) == 1
    own = [span for span in spans if span.parent_id == done.span_id]
    [decode] = [span for span in own if span.name == "decode"]
    assert [name for name, _ in decode.events] == ["preempted", "resumed"]
    assert sorted(span.name for span in own) == ["decode", "prefill", "tokenize"]
    for span in own:
        assert done.start <= span.start <= span.end <= done.end
    assert waited.end <= lost[0].start <= done.start
    assert max(span.end for span in own) <= request.end
    assert "Once upon" not in json.dumps([[span.attributes, span.events] for span in spans])
