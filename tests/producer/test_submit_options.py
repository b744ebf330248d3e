"""What a conversation may have besides its messages, notes, prompt ids, and the client's doors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient, Client
from inferq.producer.prompt import prompt_token_bound
from inferq.protocol.errors import InvalidRequestError, QueueFull, ServerLost
from inferq.protocol.messages import (
    ChatMessage,
    ChatPrompt,
    Event,
    FinishReason,
    Terminal,
    TextPrompt,
    TokenLogprob,
)
from inferq.protocol.replies import QueueLength

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "x"}


async def test_messages_as_maps_may_have_what_conversations_with_tools_need(
    client: AsyncClient, worker: Any
) -> None:
    await client.submit(
        messages=[
            USER | {"name": "Ada", "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "tool_calls": [CALL], "reasoning_content": "Hm."},
            {"role": "tool", "content": "y", "tool_call_id": "c1"},
        ],
        tools=[TOOL],
        chat_template_kwargs={"enable_thinking": True},
    )
    _, job = await worker.claim_one()
    assert job.prompt == ChatPrompt(
        (
            ChatMessage("user", "x", {"name": "Ada"}),
            ChatMessage("assistant", None, {"tool_calls": [CALL]}),
            ChatMessage("assistant", None, {"tool_calls": [CALL], "reasoning_content": "Hm."}),
            ChatMessage("tool", "y", {"tool_call_id": "c1"}),
        ),
        tools=(TOOL,),
        template_kwargs={"enable_thinking": True},
    )


def test_the_bound_of_a_prompt_counts_its_tools() -> None:
    plain = ChatPrompt((ChatMessage("user", "x"),))
    assert prompt_token_bound(ChatPrompt(plain.messages, (TOOL,))) > prompt_token_bound(plain) + 50


async def test_options_that_ask_for_nothing_go_with_every_prompt(
    client: AsyncClient, worker: Any
) -> None:
    await client.submit(
        "x",
        tools=[],
        chat_template_kwargs=None,
        add_generation_prompt=True,
        continue_final_message=False,
    )
    _, job = await worker.claim_one()
    assert job.prompt == TextPrompt("x")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompt": "x", "tools": [TOOL]}, "tools"),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": [1], "continue_final_message": True}, "continue_final_message"),
        ({"prompt": [1], "add_special_tokens": False}, "add_special_tokens"),
        ({"messages": [USER], "add_special_tokens": False}, "add_special_tokens"),
        ({"messages": [USER], "tools": {"a": 1}}, "tools"),
        ({"messages": [USER], "tools": ["f"]}, "tools"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER], "chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"messages": [USER | {"tool_calls": []}, {"role": "a"}]}, "messages.content"),
        ({"prompt": "x", "note": b""}, "note"),
        ({"prompt": "x", "note": "text"}, "note"),
        ({"prompt": "x", "note": b"x" * 4097}, "note"),
        ({"prompt": "x", "return_prompt_token_ids": 1}, "return_prompt_token_ids"),
        ({"prompt": "x", "add_special_tokens": None}, "add_special_tokens"),
    ],
)
async def test_a_bad_option_is_refused_with_the_field_named(
    client: AsyncClient, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await client.submit(**arguments)
    assert caught.value.field == field


async def test_an_argument_that_nobody_knows_is_a_fault_of_the_program(
    client: AsyncClient,
) -> None:
    with pytest.raises(TypeError, match="'temperature'"):
        await client.submit("x", temperature=1.0)  # type: ignore[call-arg]


async def test_the_first_submissions_note_is_what_a_status_shows(client: AsyncClient) -> None:
    first = await client.submit("x", note=b"\x00first", idempotency_key="k")
    again = await client.submit("x", note=b"second", idempotency_key="k")
    assert (again.id, again.created) == (first.id, False)
    assert (await again.status()).note == b"\x00first"


async def test_a_result_has_the_prompts_ids_and_the_texts_of_tokens(
    client: AsyncClient, worker: Any
) -> None:
    handle = await client.submit("x", return_prompt_token_ids=True)
    claimed, job = await worker.claim_one()
    assert job.return_prompt_token_ids
    logprobs = TokenLogprob(-1.0, ((7, -1.0),))
    first = Event(
        token_ids=(7,),
        text="a",
        text_ends=(1,),
        logprobs=(logprobs,),
        prompt_token_ids=(4, 5),
        token_texts={7: b"a"},
    )
    last = Event(
        offset=1,
        token_ids=(8,),
        text="b",
        text_ends=(1,),
        logprobs=(logprobs,),
        token_texts={7: b"a", 8: b"b"},
        terminal=Terminal(FinishReason.STOP),
    )
    await worker.publish(claimed, 0, first, last, terminal=FinishReason.STOP)
    result = await handle.result(timeout_s=30)
    assert result.prompt_token_ids == (4, 5)
    assert result.token_texts == {7: b"a", 8: b"b"}
    events = [event async for event in handle.stream()]
    assert [event.prompt_token_ids for event in events] == [(4, 5), None]
    assert events[1].token_texts == last.token_texts
    [resumed] = [event async for event in handle.stream(from_offset=1)]
    assert resumed == events[1]


async def test_the_length_of_a_queue_is_that_of_all_its_partitions(
    valkey_url: str, queue: str
) -> None:
    async with AsyncClient(valkey_url, queue, partitions=3, queue_limit=2) as client:
        for _ in range(3):
            await _submit_anywhere(client, delay_s=60)
        handle = await _submit_anywhere(client)
        assert await client.queue_length() == QueueLength(1, 0, 3, finished_total=0, limit=6)
        await handle.cancel()
        assert await client.queue_length() == QueueLength(0, 0, 3, finished_total=1, limit=6)


async def _submit_anywhere(client: AsyncClient, **options: float) -> Any:
    """Submit to a partition that has room; each has place for two."""
    while True:
        try:
            return await client.submit("x", **options)
        except QueueFull:
            continue


async def test_an_operation_of_the_callers_own_uses_the_clients_connections(
    own_server: EmbeddedServer, queue: str
) -> None:
    async with AsyncClient(own_server.url, queue) as client:
        await client.ping()

        async def count(connection: redis.asyncio.Redis) -> int:
            await asyncio.sleep(0.01)
            return int(await connection.incr("{mine}:count"))

        counted = await asyncio.gather(
            *(client.run(count, slot_key="{mine}:count") for _ in range(40))
        )
        assert sorted(counted) == list(range(1, 41))

        async def clients(connection: redis.asyncio.Redis) -> int:
            return len(await connection.client_list())

        assert await client.run(clients, slot_key="{other}") <= 4


async def test_an_operation_is_repeated_until_a_server_that_went_away_is_back(
    own_server: EmbeddedServer, queue: str
) -> None:
    async with AsyncClient(own_server.url, queue, timeout_s=20) as client:
        await client.ping()
        await asyncio.to_thread(own_server.kill)
        asking = asyncio.create_task(client.run(lambda r: r.echo(b"x"), slot_key="{a}"))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(own_server.restart)
        assert await asking == b"x"


async def test_an_operation_without_a_server_raises_our_error(
    unused_tcp_port: int, queue: str
) -> None:
    async with AsyncClient(f"redis://127.0.0.1:{unused_tcp_port}", queue) as client:
        with pytest.raises(ServerLost):
            await client.run(lambda r: r.ping(), slot_key="{a}")


def test_plain_code_may_run_operations_too(sync_client: Client) -> None:
    assert sync_client.run(lambda r: r.echo(b"x"), slot_key="{a}") == b"x"
