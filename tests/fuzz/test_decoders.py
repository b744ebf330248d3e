"""Every decoder of bytes from outside, on anything: its own typed error or a value, little memory.

`make fuzz` runs these with many more examples (INFERQ_FUZZ_EXAMPLES).
"""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq.producer.subscription import Entry
from inferq.producer.tasks.outbox import to_delivery
from inferq.producer.workers import WorkerInfo
from inferq.protocol.errors import (
    DecodeError,
    InferqError,
    InvalidRequestError,
    ProtocolVersionError,
)
from inferq.protocol.keys import Lane, QueueKeys, new_job_id
from inferq.protocol.messages import (
    ChatMessage,
    ChatPrompt,
    Event,
    Job,
    Task,
    TextPrompt,
    TokenLogprob,
)
from inferq.protocol.params import SamplingParams
from inferq.protocol.replies import DeadLetter
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.webhooks import OutboxEntry, Webhook

EXAMPLES = int(os.environ.get("INFERQ_FUZZ_EXAMPLES", "150"))
#: A decoder may take this many bytes for each byte of its input, and as many more at least.
BYTES_PER_BYTE = 200
BYTES_AT_LEAST = 1 << 20

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(
            st.sampled_from(["v", "id", "p", "m", "s", "n", "md", "cs", "t", "i", "o", "x", "e"])
            | st.sampled_from(["l", "pl", "f", "r", "c", "end", "h", "q", "pf", "d", "a", "er"])
            | st.sampled_from(["k", "as", "tl", "ck", "cg", "rp", "pt", "tx", "name", "tool_calls"])
            | st.sampled_from(["type", "function", "arguments", "reasoning_content"])
            | st.text(max_size=4),
            inner,
            max_size=12,
        )
    ),
    max_leaves=40,
)


def _pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))


_GOOD_JOB = Job(new_job_id(), TextPrompt("hello"), SamplingParams(seed=1)).encode()
_GOOD_EVENT = Event(offset=0, token_ids=(1, 2), text="ab", text_ends=(1, 2)).encode()
_GOOD_CHAT = Job(
    new_job_id(),
    ChatPrompt(
        (
            ChatMessage(
                "assistant",
                None,
                {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": [1]}'}}]},
            ),
            ChatMessage("tool", "x", {"tool_call_id": "1"}),
        ),
        tools=({"type": "function", "function": {"name": "f", "parameters": {"a": 1.5}}},),
        template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    SamplingParams(seed=1),
    task=Task.TOKENIZE,
    return_prompt_token_ids=True,
).encode()
_GOOD_DETAILS = Event(
    token_ids=(1,),
    text="a",
    text_ends=(1,),
    logprobs=(TokenLogprob(-1.0, ((1, -1.0), (3, -2.0))),),
    prompt_logprobs=(None, TokenLogprob(-1.0)),
    prompt_token_ids=(4, 5),
    token_texts={1: b"a", 3: b"\xf0\x9f", 4: b"", 5: b"b"},
).encode()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A real message with some bytes changed, cut or repeated."""
    payload = bytearray(draw(st.sampled_from([_GOOD_JOB, _GOOD_EVENT, _GOOD_CHAT, _GOOD_DETAILS])))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(payload) - 1))
        payload[at] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(payload)))
    return bytes(payload[:cut] * draw(st.integers(1, 3)))


#: Lengths that promise far more than follows, deep nesting, and other old tricks.
bombs = st.sampled_from(
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 10_000,
        b"\x81\xa1p" * 10_000,
        b"\xdc\xff\xff" * 1000,
        _pack({"v": 1, "id": "x", "p": [2**63] * 10_000}),
        _pack({"v": 2**64 - 1}),
        _pack({"v": 1, "id": "0" * 32 + "-0", "m": [["u", "x", {"name": [[]] * 10_000}]]}),
        _pack({"v": 1, "id": "0" * 32 + "-0", "m": [["u", "x"]], "tl": [{"a": {}}] * 10_000}),
        _pack({"tx": [[1, b""]] * 10_000}),
        b"",
    ]
)
anything = st.binary(max_size=300) | values.map(_pack) | damaged() | bombs
report_keys = st.sampled_from(
    ["t", "model", "adapters", "blocks", "free", "running", "rates", "every", "draining"]
)
numbers = anything | st.integers().map(lambda n: str(n).encode())


def _within_memory(decode: Callable[[bytes], Any], payload: bytes) -> None:
    tracemalloc.start()
    try:
        decode(payload)
    except (DecodeError, ProtocolVersionError, InvalidRequestError):
        pass  # its own errors: what a decoder is for
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= BYTES_AT_LEAST + BYTES_PER_BYTE * len(payload)


@settings(max_examples=EXAMPLES)
@given(anything)
def test_any_bytes_are_a_job_or_a_decode_error(payload: bytes) -> None:
    _within_memory(Job.decode, payload)


@settings(max_examples=EXAMPLES)
@given(anything)
def test_any_bytes_are_an_event_or_a_decode_error(payload: bytes) -> None:
    _within_memory(Event.decode, payload)


@settings(max_examples=EXAMPLES)
@given(
    st.dictionaries(report_keys | st.text(max_size=8), values, max_size=8), st.integers(0, 2**50)
)
def test_any_map_is_a_workers_report(report: dict[str, Any], now_ms: int) -> None:
    info = WorkerInfo.from_report("w", 0, report, now_ms)
    told_ms = report.get("t", 0)
    if not isinstance(told_ms, int):
        told_ms = 0  # as long ago as can be
    assert info.age_s == max(0, now_ms - told_ms) / 1000
    assert info.state in {"serving", "draining", "late", "gone"}


@settings(max_examples=EXAMPLES)
@given(
    st.dictionaries(
        st.sampled_from([b"kind", b"id", b"lane", b"reason", b"payload", b"time", b"budget"]),
        numbers,
    )
)
def test_any_fields_are_a_dead_letter(fields: dict[bytes, bytes]) -> None:
    assert DeadLetter.from_fields("1-1", fields).entry_id == "1-1"


_GOOD_HOOK = Webhook("https://example.com/hook").encode()
hooks = (
    anything
    | st.just(_GOOD_HOOK)
    | st.fixed_dictionaries({}, optional={"u": values, "e": values, "s": values}).map(_pack)
)


@settings(max_examples=EXAMPLES)
@given(
    st.booleans().flatmap(
        lambda is_readable: st.fixed_dictionaries(
            {},
            optional={
                b"id": anything,
                b"finish": st.sampled_from([b"stop", b"error"]) if is_readable else anything,
                b"time": numbers,
                b"hook": st.just(_GOOD_HOOK) if is_readable else hooks,
            },
        )
    )
)
def test_any_entry_of_the_outbox_is_a_delivery_or_a_decode_error(
    fields: dict[bytes, bytes],
) -> None:
    try:
        delivery = to_delivery(OutboxEntry.from_fields("1-1", fields), None, queue="q")
    except DecodeError:
        return
    assert delivery is not None
    assert json.loads(delivery.body)["data"]["finish_reason"] in ("stop", "error")


@settings(max_examples=EXAMPLES)
@given(
    st.integers(0, 2**63), st.integers(0, 2**63), st.dictionaries(st.binary(max_size=2), anything)
)
def test_any_entry_of_a_stream_is_an_event_or_a_decode_error(
    total: int, end: int, fields: dict[bytes, bytes]
) -> None:
    entry = Entry.from_redis(b"%d-%d" % (total, end), fields)
    _within_memory(Event.decode, entry.payload)


@pytest.fixture
def lane_rounds() -> int:
    return max(20, EXAMPLES // 10)


async def test_a_claim_survives_any_entries_of_its_lanes(
    redis_client: redis.asyncio.Redis, queue: str, lane_rounds: int
) -> None:
    scripts = QueueScripts(redis_client, QueueKeys(queue))
    good = []
    entries = st.lists(
        st.tuples(
            st.sampled_from(list(Lane)),
            st.dictionaries(st.sampled_from([b"id", b"cost", b"job", b"x"]), numbers, min_size=1),
        ),
        max_size=lane_rounds,
        min_size=lane_rounds,
    )
    found: list[Any] = []

    @settings(max_examples=1, database=None)
    @given(entries)
    def draw(drawn: list[Any]) -> None:
        found.extend(drawn)

    draw()
    for lane, fields in found:
        await redis_client.xadd(scripts.keys.jobs(lane), fields)
    for _ in range(3):
        job = Job(new_job_id(), TextPrompt("x"), SamplingParams())
        good.append(job.id)
        await scripts.enqueue(
            job,
            lane=Lane.LOW,
            prompt_tokens=1,
            budget=1,
            queue_limit=10_000,
            retention_ms=60_000,
        )
    claimed: list[str] = []
    for _ in range(50):
        reply = await scripts.claim(
            "w",
            free_tokens=10**9,
            idle=False,
            max_jobs=100,
            max_model_len=1000,
            block_size=16,
            lease_ms=60_000,
            max_crashes=3,
            retention_ms=60_000,
        )
        claimed += [job.job_id for job in reply.claimed]
    assert claimed == good
    overview = await scripts.overview()
    assert [lane.waiting for lane in overview.lanes.values()] == [0, 0, 0]
    assert overview.dead_letters <= len(found)
    for letter in await scripts.dead_letters(count=10_000):
        assert letter.kind == "undecodable"


async def test_whatever_stands_in_the_books_of_workers_can_be_listed(
    redis_client: redis.asyncio.Redis, queue: str
) -> None:
    scripts = QueueScripts(redis_client, QueueKeys(queue))
    await scripts.register("good", {"model": "m"})
    for index, junk in enumerate((b"", b"\xff", b"\x93\x01", b"\xdf\xff\xff\xff\xff", b"x" * 99)):
        await redis_client.hset(scripts.keys.workers, b"\xff%d" % index, junk)
    reports = await scripts.workers()
    assert reports["good"]["model"] == "m"
    assert len(reports) == 6
    swept = await scripts.sweep(gone_ms=60_000)
    assert swept.workers_removed == 5


def test_every_error_of_a_decoder_is_an_error_of_ours() -> None:
    assert issubclass(DecodeError, InferqError)
    assert issubclass(ProtocolVersionError, InferqError)
