"""Streams: each token once and in order, from any offset, with a typed end on every path."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inferq.producer import AsyncClient, StreamEvent
from inferq.producer.reader import PROBE_S
from inferq.protocol.errors import (
    ErrorCode,
    InferqError,
    InvalidRequestError,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotFound,
    ResultTimeout,
    StreamExpired,
    StreamGap,
)
from inferq.protocol.messages import (
    ErrorInfo,
    Event,
    FinishReason,
    Terminal,
    TokenLogprob,
    Usage,
)
from inferq.protocol.params import SamplingParams


async def read(stream: Any) -> list[StreamEvent]:
    return [event async for event in stream]


def joined(events: list[StreamEvent]) -> tuple[str, list[int]]:
    return "".join(e.text for e in events), [t for e in events for t in e.token_ids]


def text_of(first: int, end: int) -> str:
    return "".join(f"{i} " for i in range(first, end))


async def test_tokens_come_as_they_are_published_and_the_end_says_how(
    client: AsyncClient, worker: Any, words: Any, ending: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    stream = handle.stream()
    for i in range(3):
        await worker.publish(claimed, i, words(i, i + 1))
        event = await anext(stream)
        assert (event.text, event.token_ids, event.offset) == (f"{i} ", (i,), i)
        assert (event.next_offset, event.finish_reason, event.usage) == (i + 1, None, None)
    await worker.publish(claimed, 3, ending(3, text="tail"), terminal=FinishReason.LENGTH)
    last = await anext(stream)
    assert (last.text, last.token_ids, last.finish_reason) == ("tail", (), FinishReason.LENGTH)
    assert last.usage == Usage(3, 1, 3)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert stream.terminal is not None
    assert stream.terminal.attempts == 1


async def test_a_result_is_the_whole_answer(
    client: AsyncClient, worker: Any, words: Any, ending: Any
) -> None:
    handle = await client.submit("x", SamplingParams(logprobs=0))
    claimed, _ = await worker.claim_one()
    logprobs = (TokenLogprob(-0.5, ((7, -0.5),)), TokenLogprob(-1.5))
    await worker.publish(
        claimed,
        0,
        Event(token_ids=(7, 8), text="ab", text_ends=(1, 2), logprobs=logprobs),
        Event(offset=2, token_ids=(9,), text="c", text_ends=(1,), logprobs=logprobs[:1]),
    )
    end = Event(
        offset=3,
        finish_reason=FinishReason.STOP,
        stop_reason="d",
        terminal=Terminal(FinishReason.STOP, Usage(1, 0, 3), attempts=2),
    )
    await worker.publish(claimed, 3, end, terminal=FinishReason.STOP)
    result = await handle.result()
    assert (result.text, result.token_ids) == ("abc", (7, 8, 9))
    assert result.logprobs == (*logprobs, logprobs[0])
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, "d")
    assert (result.usage, result.attempts) == (Usage(1, 0, 3), 2)
    # it stays readable
    assert await client.job(handle.id).result() == result


async def test_outputs_of_one_job_are_told_apart(client: AsyncClient, worker: Any) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    end = Terminal(FinishReason.STOP, Usage(1, 0, 3))
    await worker.publish(
        claimed,
        0,
        Event(index=1, token_ids=(5,), text="b", text_ends=(1,)),
        Event(index=0, token_ids=(4,), text="a", text_ends=(1,), finish_reason=FinishReason.STOP),
        Event(
            index=1,
            offset=1,
            token_ids=(6,),
            text="c",
            text_ends=(1,),
            finish_reason=FinishReason.LENGTH,
            terminal=end,
        ),
        terminal=FinishReason.STOP,
    )
    result = await handle.result()
    assert [(o.index, o.text, o.finish_reason) for o in result.outputs] == [
        (0, "a", FinishReason.STOP),
        (1, "bc", FinishReason.LENGTH),
    ]


async def test_what_is_known_of_outputs_and_prompt_is_in_the_result(
    client: AsyncClient, worker: Any
) -> None:
    handle = await client.submit("x", SamplingParams(n=2, logprobs=0, prompt_logprobs=0))
    claimed, _ = await worker.claim_one()
    scores = (None, TokenLogprob(-0.5, ((7, -0.5),)))
    ends = {"finish_reason": FinishReason.STOP}
    await worker.publish(
        claimed,
        0,
        Event(0, 0, (4,), "a", (1,), cumulative_logprob=-1.0, prompt_logprobs=scores, **ends),
        Event(1, 0, (5,), "b", (1,)),
        Event(
            1,
            1,
            (6,),
            "c",
            (1,),
            cumulative_logprob=-2.5,
            terminal=Terminal(FinishReason.STOP),
            **ends,
        ),
        terminal=FinishReason.STOP,
    )
    result = await handle.result()
    assert [o.cumulative_logprob for o in result.outputs] == [-1.0, -2.5]
    assert result.prompt_logprobs == scores
    events = await read(handle.stream())
    assert [e.prompt_logprobs for e in events] == [scores, None, None]
    assert [e.cumulative_logprob for e in events] == [-1.0, None, -2.5]
    assert [(e.index, e.offset) for e in await read(handle.stream(2))] == [(1, 1)]


@pytest.mark.parametrize("each", [1, 4, 10])
@pytest.mark.parametrize("offset", [0, 1, 5, 9, 10])
async def test_a_stream_resumes_at_any_offset_also_within_an_event(
    client: AsyncClient, worker: Any, offset: int, each: int
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    await worker.serve(claimed, 10, each=each)
    events = await read(client.job(handle.id).stream(from_offset=offset))
    assert joined(events) == (text_of(offset, 10), list(range(offset, 10)))
    assert events[0].offset == offset
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert events[-1].next_offset == 10


async def test_a_reader_that_drops_resumes_while_the_job_runs(
    client: AsyncClient, worker: Any, words: Any, ending: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    before = handle.stream()
    await worker.publish(claimed, 0, words(0, 3))
    first = await anext(before)
    await before.aclose()
    after = asyncio.create_task(read(handle.stream(first.next_offset)))
    await worker.publish(claimed, 3, words(3, 5))
    await worker.publish(claimed, 5, ending(5), terminal=FinishReason.LENGTH)
    assert joined(await after)[1] == [3, 4]


async def test_a_reader_that_drops_before_the_first_event_gets_all(
    client: AsyncClient, worker: Any
) -> None:
    handle = await client.submit("x")
    before = handle.stream(timeout_s=0.05)
    with pytest.raises(ResultTimeout):
        await anext(before)
    offset = before.next_offset
    await before.aclose()
    claimed, _ = await worker.claim_one()
    await worker.serve(claimed, 4)
    assert joined(await read(handle.stream(offset)))[1] == [0, 1, 2, 3]


async def test_a_terminal_event_with_tokens_is_cut_too(client: AsyncClient, worker: Any) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    event = Event(
        token_ids=(0, 1, 2),
        text="abc-held-back",
        text_ends=(1, 2, 3),
        terminal=Terminal(FinishReason.STOP),
    )
    await worker.publish(claimed, 0, event, terminal=FinishReason.STOP)
    assert joined(await read(handle.stream(0))) == ("abc-held-back", [0, 1, 2])
    assert joined(await read(handle.stream(2))) == ("c-held-back", [2])
    assert joined(await read(handle.stream(3))) == ("-held-back", [])


async def test_an_offset_beyond_the_end_is_refused(client: AsyncClient, worker: Any) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    beyond = asyncio.create_task(read(handle.stream(11)))
    await asyncio.sleep(0.05)
    await worker.serve(claimed, 10)
    for offset in (11, 10**6):
        with pytest.raises(InvalidRequestError, match="beyond the job's end at 10") as caught:
            await read(handle.stream(offset))
        assert (caught.value.field, caught.value.limit) == ("from_offset", "10")
    with pytest.raises(InvalidRequestError):
        await beyond


@pytest.mark.parametrize(
    "offset", [-1, pytest.param(-(10**5000), id="very long"), "3", 1.0, None, True]
)
async def test_an_offset_that_is_none_is_refused(client: AsyncClient, offset: Any) -> None:
    handle = await client.submit("x")
    with pytest.raises(InvalidRequestError) as caught:
        handle.stream(offset)
    assert caught.value.field == "from_offset"


@pytest.mark.parametrize("offset", [2**63, 2**64, pytest.param(10**5000, id="very long")])
async def test_an_offset_that_no_stream_can_reach_is_refused(
    client: AsyncClient, offset: int
) -> None:
    with pytest.raises(InvalidRequestError, match="must be a whole number in") as caught:
        client.job("0" * 32 + "-0").stream(offset)
    assert (caught.value.field, caught.value.limit) == ("from_offset", str(2**63 - 1))


async def test_the_largest_offset_goes_to_the_server_and_is_beyond_the_end(
    client: AsyncClient, worker: Any
) -> None:
    handle = await client.submit("x")
    await worker.serve((await worker.claim_one())[0], 2)
    with pytest.raises(InvalidRequestError, match="beyond the job's end at 2"):
        await read(handle.stream(2**63 - 1))


async def test_an_expired_stream_is_a_typed_error_and_starts_nothing(
    client: AsyncClient, worker: Any, valkey_client: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    await worker.serve(claimed, 3)
    await valkey_client.delete(worker.keys.job(handle.id), worker.keys.out(handle.id))
    for offset, error in ((0, JobNotFound), (2, StreamExpired), (3, StreamExpired)):
        with pytest.raises(error):
            await read(handle.stream(offset))
    with pytest.raises(JobNotFound):
        await client.job("0" * 32 + "-0").result()
    assert await worker.claim() == []


async def test_events_that_are_gone_while_the_job_is_known_are_expired_too(
    client: AsyncClient, worker: Any, valkey_client: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    await worker.serve(claimed, 3)
    await valkey_client.delete(worker.keys.out(handle.id))
    with pytest.raises(StreamExpired):
        await handle.result()


async def test_an_emptied_server_ends_a_waiting_reader(
    own_server: Any, queue: str, fake_worker: Any, words: Any
) -> None:
    async with AsyncClient(own_server.url, queue) as client:
        worker = fake_worker(own_server.url)
        handle = await client.submit("x")
        claimed, _ = await worker.claim_one()
        stream = handle.stream()
        await worker.publish(claimed, 0, words(0, 1))
        await anext(stream)
        await worker.client.flushall()
        async with asyncio.timeout(8):
            with pytest.raises(StreamExpired):
                await anext(stream)
        # new jobs are served
        fresh = await client.submit("y")
        await worker.serve((await worker.claim_one())[0], 2)
        assert (await fresh.result()).token_ids == (0, 1)


async def test_a_missing_event_is_a_gap_not_a_silent_loss(
    client: AsyncClient, worker: Any, valkey_client: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    await worker.serve(claimed, 4)
    await valkey_client.xdel(worker.keys.out(handle.id), "2-0")
    stream = handle.stream()
    assert (await anext(stream)).token_ids == (0,)
    with pytest.raises(StreamGap) as caught:
        await anext(stream)
    assert (caught.value.expected, caught.value.found) == (1, 2)


async def test_a_server_that_lost_its_tail_repeats_nothing(
    client: AsyncClient, worker: Any, valkey_client: Any, words: Any, ending: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    stream = handle.stream()
    await worker.publish(claimed, 0, words(0, 2), words(2, 4))
    seen = [await anext(stream), await anext(stream)]
    # what a restart leaves of an append-only file that was cut: two tokens fewer
    out = worker.keys.out(handle.id)
    await valkey_client.delete(out)
    await valkey_client.xadd(out, {"e": words(0, 2).encode()}, id="2-0")
    await valkey_client.hset(worker.keys.job(handle.id), "offset", 2)
    await worker.publish(claimed, 2, words(2, 5))
    await worker.publish(claimed, 5, ending(5), terminal=FinishReason.LENGTH)
    seen += await read(stream)
    assert joined(seen) == (text_of(0, 5), list(range(5)))


async def test_a_job_that_ends_before_what_was_seen_still_ends(
    client: AsyncClient, worker: Any, valkey_client: Any, words: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    stream = handle.stream()
    await worker.publish(claimed, 0, words(0, 4))
    await anext(stream)
    await valkey_client.delete(worker.keys.out(handle.id))
    await valkey_client.hset(worker.keys.job(handle.id), "offset", 0)
    await worker.scripts.release("fake", [(handle.id, claimed.epoch, None)])
    assert await handle.cancel() == "cancelled"
    async with asyncio.timeout(8):
        with pytest.raises(JobCancelled):
            await anext(stream)


async def test_a_failed_job_raises_its_reason_after_what_came_before(
    client: AsyncClient, worker: Any, words: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    info = ErrorInfo(ErrorCode.INTERNAL, "the engine broke", "prompt", "5")
    end = Event(offset=2, text="!", terminal=Terminal(FinishReason.ERROR, error=info))
    await worker.publish(claimed, 0, words(0, 2), end, terminal=FinishReason.ERROR)
    stream = handle.stream()
    assert [(await anext(stream)).text for _ in range(2)] == ["0 1 ", "!"]
    for _ in range(2):
        with pytest.raises(JobFailed, match="the engine broke") as caught:
            await anext(stream)
        assert caught.value.info == info
    with pytest.raises(JobFailed):
        await handle.result()


async def test_a_cancelled_job_raises_job_cancelled(client: AsyncClient) -> None:
    handle = await client.submit("x")
    waiting = asyncio.create_task(handle.result())
    await asyncio.sleep(0.05)
    assert await handle.cancel() == "cancelled"
    with pytest.raises(JobCancelled):
        await waiting


async def test_a_deadline_without_any_worker_ends_the_reader(client: AsyncClient) -> None:
    handle = await client.submit("x", deadline_s=0.4)
    async with asyncio.timeout(5):
        with pytest.raises(JobExpired):
            await handle.result()
    assert (await handle.status()).finish_reason is FinishReason.EXPIRED


async def test_a_deadline_soon_after_an_event_ends_the_reader_of_a_job_handed_back(
    client: AsyncClient, worker: Any, words: Any
) -> None:
    handle = await client.submit("x", deadline_s=2.5)
    claimed, _ = await worker.claim_one()
    stream = handle.stream()
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(1.5)  # the reader has looked after the job and knows the deadline
    await worker.publish(claimed, 0, words(0, 1))
    published_at = asyncio.get_running_loop().time()
    await first
    await worker.scripts.release(worker.name, [(claimed.job_id, claimed.epoch, None)])
    with pytest.raises(JobExpired):
        await anext(stream)
    assert asyncio.get_running_loop().time() - published_at < PROBE_S * 0.9


async def test_no_worker_is_a_time_out_and_the_job_still_runs_later(
    client: AsyncClient, worker: Any
) -> None:
    handle = await client.submit("x")
    with pytest.raises(ResultTimeout) as caught:
        await handle.result(timeout_s=1)
    assert isinstance(caught.value, TimeoutError)
    assert (caught.value.job_id, caught.value.timeout_s) == (handle.id, 1)
    await worker.serve((await worker.claim_one())[0], 3)
    assert (await handle.result(timeout_s=5)).token_ids == (0, 1, 2)


async def test_the_result_time_out_is_for_the_whole_and_the_streams_for_each_event(
    client: AsyncClient, worker: Any, words: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()

    async def drip() -> None:
        for i in range(8):
            await worker.publish(claimed, i, words(i, i + 1))
            await asyncio.sleep(0.1)

    dripping = asyncio.create_task(drip())
    with pytest.raises(ResultTimeout):
        await handle.result(timeout_s=0.4)
    stream = handle.stream(timeout_s=0.4)
    seen = [await anext(stream) for _ in range(8)]
    with pytest.raises(ResultTimeout):
        await anext(stream)
    # and goes on after a time-out
    await worker.publish(claimed, 8, words(8, 9))
    seen.append(await anext(stream))
    assert joined(seen)[1] == list(range(9))
    await dripping


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), "1", None])
async def test_a_time_out_must_be_a_number_of_seconds(client: AsyncClient, seconds: Any) -> None:
    handle = await client.submit("x")
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        handle.stream(timeout_s=seconds)
    with pytest.raises(InvalidRequestError, match="timeout_s"):
        await handle.result(timeout_s=seconds)


async def test_undecodable_events_are_a_typed_error(
    client: AsyncClient, worker: Any, valkey_client: Any
) -> None:
    handle = await client.submit("x")
    await valkey_client.xadd(worker.keys.out(handle.id), {"e": b"\xc1"}, id="1-0")
    with pytest.raises(InferqError, match="not msgpack"):
        await handle.result()


async def test_a_cancelled_read_loses_nothing(
    client: AsyncClient, worker: Any, words: Any, ending: Any
) -> None:
    handle = await client.submit("x")
    claimed, _ = await worker.claim_one()
    stream = handle.stream()
    for _ in range(5):
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    await worker.serve(claimed, 5)
    assert joined(await read(stream))[1] == [0, 1, 2, 3, 4]
