"""Jobs on the wire: round trips, limits, every bad value, and random bytes."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq.protocol import messages
from inferq.protocol.errors import DecodeError, InvalidRequestError, ProtocolVersionError
from inferq.protocol.keys import new_job_id
from inferq.protocol.messages import (
    ChatMessage,
    ChatPrompt,
    Job,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from inferq.protocol.params import SamplingParams
from inferq.protocol.structured import StructuredOutputs

JOB_ID = "0" * 31 + "f-3"

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50)
prompts: st.SearchStrategy[Prompt] = st.one_of(
    texts.map(TextPrompt),
    st.lists(st.integers(0, messages.MAX_TOKEN_ID), min_size=1, max_size=50).map(
        lambda ids: TokenPrompt(tuple(ids))
    ),
    st.lists(st.builds(ChatMessage, texts, texts), min_size=1, max_size=5).map(
        lambda turns: ChatPrompt(tuple(turns))
    ),
)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10),
    top_k=st.integers(-1, 1000),
    top_p=st.floats(0.01, 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 1000),
    stop=st.lists(texts, max_size=3),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    ignore_eos=st.booleans(),
)
wire_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
    | st.binary(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("abcdefghilmnopqrstvxé", max_size=3), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(
    st.builds(
        Job,
        st.just(JOB_ID),
        prompts,
        sampling_params,
        st.none() | texts,
        st.dictionaries(texts, texts, max_size=3),
        st.integers(0, 2**53),
        st.none() | texts,
    )
)
def test_a_job_comes_back_as_it_was(job: Job) -> None:
    assert Job.decode(job.encode()) == job


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3, logprobs=-1, prompt_logprobs=0, truncate_prompt_tokens=-1),
        SamplingParams(n=2, best_of=4, logit_bias={7: -1.5, 3: 100}, bad_words="no"),
        SamplingParams(beam_width=4, n=2, length_penalty=0.5, early_stopping="never"),
        SamplingParams(beam_width=2, early_stopping=True),
        SamplingParams(allowed_token_ids=[3, 1], repetition_penalty=1.5, presence_penalty=-1),
        SamplingParams(detokenize=False, spaces_between_special_tokens=False),
        SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object"})),
        SamplingParams(structured_outputs=StructuredOutputs(choice=["a", "b"])),
        SamplingParams(structured_outputs=StructuredOutputs(json_object=True)),
    ],
)
def test_every_parameter_travels(params: SamplingParams) -> None:
    job = Job(JOB_ID, TextPrompt("x"), params, cache_salt="mine")
    assert Job.decode(job.encode()) == job


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_as_no_job(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        Job.decode(payload)


@settings(max_examples=500)
@given(wire_values)
def test_random_msgpack_is_refused_as_no_job(value: Any) -> None:
    with pytest.raises(DecodeError):
        Job.decode(msgpack.packb(value))


@settings(max_examples=500)
@given(
    st.dictionaries(
        st.sampled_from(["p", "m", "s", "n", "md", "t", "cs", "zz"]), wire_values, max_size=5
    )
)
def test_a_job_with_any_field_broken_is_refused_with_a_typed_error_or_whole(
    broken: dict[str, Any],
) -> None:
    wire = {"v": 1, "id": JOB_ID, "p": "x"} | broken
    try:
        job = Job.decode(msgpack.packb(wire))
    except (DecodeError, InvalidRequestError):
        return
    assert Job.decode(job.encode()) == job


def test_unknown_keys_are_ignored() -> None:
    wire = {"v": 1, "id": JOB_ID, "p": "x", "future": [1, {"a": None}]}
    assert Job.decode(msgpack.packb(wire)).prompt == TextPrompt("x")


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.5, [1]])
def test_another_major_version_is_refused_by_its_name(version: Any) -> None:
    with pytest.raises(ProtocolVersionError, match="version"):
        Job.decode(msgpack.packb({"v": version, "id": JOB_ID, "p": "x"}))


def test_a_payload_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(DecodeError, match=f"more than {messages.MAX_JOB_BYTES}") as refused:
        Job.decode(b"\xc1" * (64 * 2**20))
    assert len(refused.value.payload) == 1024


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x91" * 10_000 + b"\x90", id="10,000 deep"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="an array of 4 billion"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="a map of 4 billion"),
        pytest.param(b"\xdb\xff\xff\xff\xff", id="a string of 4 GB"),
        pytest.param(b"", id="empty"),
        pytest.param(msgpack.packb({1: 2}), id="keys that are not text"),
        pytest.param(msgpack.packb({"v": 1, "id": JOB_ID, "p": "x"}) + b"\x00", id="trailing"),
        pytest.param(b"\x81\xa1p\xa2\xff\xfe", id="not UTF-8"),
    ],
)
def test_hostile_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        Job.decode(payload)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="no prompt"),
        pytest.param({"p": "x", "m": [["user", "x"]]}, id="two prompts"),
        pytest.param({"p": {"a": 1}}, id="prompt of another type"),
        pytest.param({"p": "x", "s": []}, id="parameters not a map"),
        pytest.param({"p": "x", "md": []}, id="metadata not a map"),
        pytest.param({"p": "x", "t": "now"}, id="time not a number"),
        pytest.param({"p": "x", "t": True}, id="time a bool"),
        pytest.param({"m": ["x"]}, id="message not a pair"),
        pytest.param({"m": [["user"]]}, id="message without content"),
        pytest.param({"p": "x", "id": 7}, id="id not text"),
    ],
)
def test_a_malformed_job_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(DecodeError):
        Job.decode(msgpack.packb({"v": 1, "id": JOB_ID} | fields))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TextPrompt(""), "prompt"),
        (lambda: TextPrompt(7), "prompt"),  # type: ignore[arg-type]
        (lambda: TextPrompt("\ud800"), "prompt"),
        (lambda: TextPrompt("x" * (messages.MAX_PROMPT_BYTES + 1)), "prompt"),
        (lambda: TextPrompt("é" * (messages.MAX_PROMPT_BYTES // 2 + 1)), "prompt"),
        (lambda: TokenPrompt(()), "prompt_token_ids"),
        (lambda: TokenPrompt((-1,)), "prompt_token_ids"),
        (lambda: TokenPrompt((2**31,)), "prompt_token_ids"),
        (lambda: TokenPrompt((True,)), "prompt_token_ids"),
        (lambda: TokenPrompt((1.0,)), "prompt_token_ids"),  # type: ignore[arg-type]
        (lambda: TokenPrompt((0,) * (messages.MAX_PROMPT_TOKENS + 1)), "prompt_token_ids"),
        (lambda: ChatMessage("", "x"), "messages.role"),
        (lambda: ChatMessage("r" * 257, "x"), "messages.role"),
        (lambda: ChatMessage("user", None), "messages.content"),  # type: ignore[arg-type]
        (lambda: ChatMessage("user", "\udfff"), "messages.content"),
        (lambda: ChatPrompt(()), "messages"),
        (lambda: ChatPrompt((ChatMessage("user", "x"),) * 4097), "messages"),
        (lambda: ChatPrompt((ChatMessage("user", "x" * 2**21),) * 3), "messages"),
        (lambda: make_job(model=""), "model"),
        (lambda: make_job(model="m" * 257), "model"),
        (lambda: make_job(metadata={"a": 1}), "metadata"),
        (lambda: make_job(metadata={"a": "x" * 1025}), "metadata"),
        (lambda: make_job(metadata={str(n): "" for n in range(33)}), "metadata"),
        (lambda: make_job(metadata={"a": "\ud800"}), "metadata"),
        (lambda: make_job(id="x"), "job_id"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(make: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        make()
    assert refused.value.field == field
    assert refused.value.info.code == "invalid_request"


def make_job(**fields: Any) -> Job:
    defaults = {"id": JOB_ID, "prompt": TextPrompt("x"), "params": SamplingParams()}
    return Job(**(defaults | fields))


LARGEST_PARAMS = SamplingParams(
    stop=["s" * 256] * 64,
    stop_token_ids=[2**31 - 1] * 64,
    bad_words=["b" * 256] * 64,
    allowed_token_ids=[2**31 - 1] * 2**18,
    logit_bias={2**31 - 1 - i: 0.5 for i in range(1024)},
    structured_outputs={"regex": "r" * 64 * 1024},
)


def test_the_largest_parts_allowed_fit_in_a_job() -> None:
    tokens = TokenPrompt((messages.MAX_TOKEN_ID,) * messages.MAX_PROMPT_TOKENS)
    chat = ChatPrompt((ChatMessage("r" * 256, "x" * (messages.MAX_PROMPT_BYTES // 4096)),) * 4096)
    for prompt in (TextPrompt("x" * messages.MAX_PROMPT_BYTES), tokens, chat):
        job = Job(
            new_job_id(),
            prompt,
            LARGEST_PARAMS,
            "m" * 256,
            {f"{n:01024}": "v" * 1024 for n in range(32)},
        )
        assert Job.decode(job.encode()) == job
