"""The log lines about single jobs: their level, their names, and what they never show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from inferq.protocol.errors import DecodeError, ErrorInfo
from inferq.protocol.keys import Lane, new_job_id
from inferq.protocol.messages import FinishReason, Job, Terminal, Timings, Usage
from inferq.protocol.params import SamplingParams
from inferq.protocol.prompts import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from inferq.worker.jobs.job_lines import MAX_SHOWN, JobLines
from inferq.worker.queue.running import RunningJob

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def job() -> RunningJob:
    job = RunningJob(
        id=new_job_id(),
        epoch=2,
        lane=Lane.NORMAL,
        attempts=2,
        queued_ms=5,
        reserved=16,
        claimed_at=0.0,
        lease_until=9.0,
        trace_id=TRACE,
    )
    job.log.append(7, "an answer", None)
    return job


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with capture_logs() as captured:
        yield captured


def message(job: RunningJob, prompt: Prompt) -> Job:
    return Job(id=job.id, prompt=prompt, params=SamplingParams())


def test_a_job_that_goes_its_way_has_one_line_of_level_info(
    job: RunningJob, lines: list[Any]
) -> None:
    says = JobLines()
    says.claimed(job)
    says.read(job, message(job, TextPrompt("a question", True)))
    job.terminal = Terminal(FinishReason.STOP, Usage(3, 1, 1), Timings(5, 20, 30), attempts=2)
    says.done(job, 0.05)
    claimed, done = lines
    assert (claimed["log_level"], claimed["attempt"]) == ("debug", 2)
    told = {
        "ms": 50,
        "reason": "stop",
        "attempt": 2,
        "queued_ms": 5,
        "prefill_ms": 20,
        "decode_ms": 30,
    }
    assert told.items() <= done.items()
    assert done["log_level"] == "info"
    assert (done["job_id"], done["trace_id"]) == (job.id, TRACE)
    assert "code" not in done
    assert "question" not in str(lines)
    assert "answer" not in str(lines)


def test_a_failed_job_is_told_by_its_code_and_not_by_its_message(
    job: RunningJob, lines: list[Any]
) -> None:
    job.terminal = Terminal(FinishReason.ERROR, error=ErrorInfo("internal_error", "a question"))
    JobLines().done(job, 0.0)
    [done] = lines
    assert (done["reason"], done["code"]) == ("error", "internal_error")
    assert "question" not in str(done)


def test_what_costs_somebody_something_is_a_warning_and_what_is_ours_an_error(
    job: RunningJob, lines: list[Any]
) -> None:
    says = JobLines()
    says.handed_back(job)
    says.lost(job, "the lease ended")
    says.rejected(job, DecodeError("not msgpack"))
    says.not_corrected(job, TimeoutError())
    says.failed("taking tokens failed", job, ValueError("a question"))
    levels = [line["log_level"] for line in lines]
    assert levels == ["info", "warning", "warning", "warning", "error"]
    assert {line["job_id"] for line in lines} == {job.id}


CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (TextPrompt("a question" + "?" * MAX_SHOWN, True), "a question???"),
        (ChatPrompt((ChatMessage("user", "a question"),)), "user: a question"),
        (
            ChatPrompt((ChatMessage("assistant", None, {"tool_calls": [CALL]}),)),
            "assistant: ",
        ),
    ],
)
def test_prompts_and_answers_are_shown_cut_short_where_that_is_asked_for(
    job: RunningJob, lines: list[Any], prompt: Prompt, shown: str
) -> None:
    says = JobLines(log_prompts=True)
    says.read(job, message(job, prompt))
    job.terminal = Terminal(FinishReason.STOP)
    says.done(job, 0.0)
    asked, _, answered = lines
    assert asked["prompt"].startswith(shown)
    assert len(asked["prompt"]) <= MAX_SHOWN
    assert answered["texts"] == ["an answer"]
    assert {line["job_id"] for line in lines} == {job.id}


def test_token_ids_are_shown_as_such_and_counted(job: RunningJob, lines: list[Any]) -> None:
    JobLines(log_prompts=True).read(job, message(job, TokenPrompt(tuple(range(2 * MAX_SHOWN)))))
    [asked] = lines
    assert (asked["token_ids"], asked["tokens"]) == (list(range(MAX_SHOWN)), 2 * MAX_SHOWN)
    assert asked["job_id"] == job.id
