"""The trace context in a job: what is one, and what counts as none."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.keys import new_job_id
from inferq.protocol.messages import Job
from inferq.protocol.params import SamplingParams
from inferq.protocol.prompts import TextPrompt
from inferq.protocol.trace_context import MAX_STATE_BYTES, TraceContext

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
JOB = Job(id=new_job_id(), prompt=TextPrompt("x", True), params=SamplingParams())


def test_a_job_carries_parent_and_state_and_comes_back_equal() -> None:
    trace = TraceContext(PARENT, "vendor=1,t@v=2")
    job = dataclasses.replace(JOB, trace=trace)
    decoded = Job.decode(job.encode())
    assert decoded == job
    assert decoded.trace is not None
    assert (decoded.trace.trace_id, decoded.trace.span_id) == (TRACE, SPAN)
    assert decoded.trace.is_sampled


def test_a_job_without_a_trace_has_nothing_of_it_on_the_wire() -> None:
    assert not {"tp", "ts"} & msgpack.unpackb(JOB.encode()).keys()


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True), ("03", True)])
def test_the_flags_say_whether_the_caller_records(flags: str, is_sampled: bool) -> None:
    assert TraceContext(f"00-{TRACE}-{SPAN}-{flags}").is_sampled is is_sampled


def test_a_later_version_of_the_parent_is_understood() -> None:
    assert TraceContext.read(f"01-{TRACE}-{SPAN}-01-more") is not None


@pytest.mark.parametrize(
    "parent",
    [
        *(None, 7, b"00", "", "00", PARENT.upper(), PARENT + "\n", PARENT + "-more", " " + PARENT),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 10_000,
    ],
)
def test_a_malformed_parent_counts_as_none_and_the_job_is_served(parent: object) -> None:
    wire = {**msgpack.unpackb(JOB.encode()), "tp": parent, "ts": "a=1"}
    assert Job.decode(msgpack.packb(wire)) == JOB


@pytest.mark.parametrize(
    "state",
    [
        *(7, "", "a", "=1", "a=", "A=1", "a=1,a=2", "a=\u00e9", "a=1\n", ",", "a=b=c"),
        "a=" + "x" * MAX_STATE_BYTES,
        ",".join(f"k{i}=1" for i in range(33)),
    ],
)
def test_a_malformed_state_is_left_out_and_the_parent_stays(state: object) -> None:
    wire = {**msgpack.unpackb(JOB.encode()), "tp": PARENT, "ts": state}
    assert Job.decode(msgpack.packb(wire)).trace == TraceContext(PARENT)


@pytest.mark.parametrize("given", [("no parent", None), (PARENT, "no state")])
def test_one_that_a_program_makes_itself_is_checked(given: tuple[str, str | None]) -> None:
    with pytest.raises(InvalidRequestError, match="trace_context"):
        TraceContext(*given)


@given(
    st.one_of(st.none(), st.integers(), st.text(), st.binary()),
    st.one_of(st.none(), st.integers(), st.text(), st.binary()),
)
def test_whatever_comes_is_read_without_an_error(parent: object, state: object) -> None:
    TraceContext.read(parent, state)
    assert TraceContext.read(PARENT, state) is not None
