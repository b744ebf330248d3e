"""Asking for a prompt's tokens: by the high lane unless told, and nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import redis.asyncio

from inferq.producer import AsyncClient, Client, TokenizedPrompt
from inferq.protocol.errors import (
    ErrorCode,
    ErrorInfo,
    InvalidRequestError,
    JobFailed,
    ResultTimeout,
)
from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import (
    ChatMessage,
    ChatPrompt,
    Event,
    FinishReason,
    Job,
    Task,
    Terminal,
    TextPrompt,
    TokenPrompt,
    Usage,
)

EURO = "€".encode()
TOKENS = TokenizedPrompt((5, 6, 7, 5), "a€a", (b"a", EURO[:1], EURO[1:], b"a"))
FIRST = Event(token_ids=(5, 6), text="a", text_ends=(1, 1), token_texts={5: b"a", 6: EURO[:1]})
LAST = Event(
    offset=2,
    token_ids=(7, 5),
    text="€a",
    text_ends=(1, 2),
    finish_reason=FinishReason.STOP,
    terminal=Terminal(FinishReason.STOP, Usage(prompt_tokens=4)),
    token_texts={7: EURO[1:], 5: b"a"},
)


async def serve(worker: Any, *events: Event) -> tuple[Any, Job]:
    """Answer the next job with these events."""
    (claimed,) = await worker.wait_for_jobs(1, at_once=1)
    reason = events[-1].terminal.finish_reason
    await worker.publish(claimed, 0, *events, terminal=reason)
    return claimed, Job.decode(claimed.payload)


async def test_tokens_come_with_their_bytes_and_the_whole_text(
    client: AsyncClient, worker: Any
) -> None:
    asking = asyncio.create_task(client.tokenize("a€a", model="smol", add_special_tokens=False))
    claimed, job = await serve(worker, FIRST, LAST)
    assert await asking == TOKENS
    assert job.task is Task.TOKENIZE
    assert (job.prompt, job.model) == (TextPrompt("a€a", add_special_tokens=False), "smol")
    assert (claimed.lane, claimed.cost, claimed.space) == ("high", 0, 0)


async def test_nothing_of_the_answer_stays_on_the_server(
    client: AsyncClient, worker: Any, valkey_client: redis.asyncio.Redis, queue: str
) -> None:
    asking = asyncio.create_task(client.tokenize([5, 6]))
    claimed, job = await serve(worker, FIRST, LAST)
    await asking
    assert job.prompt == TokenPrompt((5, 6))
    keys = QueueKeys(queue)
    await asyncio.sleep(0.01)
    assert not await valkey_client.exists(keys.job(claimed.job_id), keys.out(claimed.job_id))
    assert (await client.queue_length()).finished_total == 1


async def test_a_conversation_is_sent_with_all_that_belongs_to_it(
    client: AsyncClient, worker: Any
) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    asking = asyncio.create_task(
        client.tokenize(
            messages=[{"role": "user", "content": "x", "name": "Ada"}],
            tools=[tool],
            chat_template_kwargs={"enable_thinking": False},
            add_generation_prompt=False,
            continue_final_message=True,
        )
    )
    _, job = await serve(worker, FIRST, LAST)
    await asking
    assert job.prompt == ChatPrompt(
        (ChatMessage("user", "x", {"name": "Ada"}),),
        (tool,),
        {"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
    )


async def test_what_nobody_answers_in_time_is_given_up(client: AsyncClient, worker: Any) -> None:
    with pytest.raises(ResultTimeout) as caught:
        await client.tokenize("a", timeout_s=0.2)
    assert caught.value.timeout_s == 0.2
    await asyncio.sleep(0.1)
    assert await worker.claim() == []
    assert (await client.queue_length()).waiting == 0


async def test_a_refusal_of_the_worker_is_raised(client: AsyncClient, worker: Any) -> None:
    info = ErrorInfo(ErrorCode.INVALID_REQUEST, "is wrong", "messages", None)
    asking = asyncio.create_task(client.tokenize(messages=[{"role": "user", "content": "x"}]))
    await serve(worker, Event(terminal=Terminal(FinishReason.ERROR, error=info)))
    with pytest.raises(JobFailed) as caught:
        await asking
    assert caught.value.info == info


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), "soon"])
async def test_a_bad_time_out_is_refused(client: AsyncClient, timeout_s: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.tokenize("a", timeout_s=timeout_s)
    assert caught.value.field == "timeout_s"


def test_plain_code_gets_the_same(sync_client: Client, worker_thread: Any) -> None:
    thread = threading.Thread(target=worker_thread.answer_next, args=(FIRST, LAST))
    thread.start()
    try:
        assert sync_client.tokenize("a€a") == TOKENS
    finally:
        thread.join()
    assert sync_client.queue_length().finished_total == 1


async def test_the_lane_can_be_given(
    client: AsyncClient, worker: Any, queue: str, valkey_client: redis.asyncio.Redis
) -> None:
    asking = asyncio.create_task(client.tokenize("a€a", lane="low"))
    (claimed,) = await worker.wait_for_jobs(1, at_once=1)
    assert await valkey_client.hget(QueueKeys(queue).job(claimed.job_id), "lane") == b"low"
    await worker.publish(claimed, 0, FIRST, LAST, terminal=FinishReason.STOP)
    assert await asking == TOKENS
    with pytest.raises(InvalidRequestError, match="lane"):
        await client.tokenize("a", lane="odd")
