"""A queue on the primary that three Sentinels name, and through a fail-over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from inferq.producer import AsyncClient
from inferq.protocol.errors import ServerLost


async def until_reached(call: Callable[[], Any]) -> Any:
    """Call again while the server is away, as the worker's loops do."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await call()
            except ServerLost:
                await asyncio.sleep(0.1)


async def test_a_stream_goes_on_through_a_fail_over(
    sentinels: Any, mini_worker: Callable[..., Any]
) -> None:
    worker = mini_worker(sentinels.url)
    async with AsyncClient(sentinels.url, worker.scripts.keys.queue, reconnect_s=30) as client:
        job = await client.submit("x")
        stream = job.stream(timeout_s=30)
        [claimed] = await worker.claim()
        await worker.token(claimed, 0)
        seen = [await anext(stream)]
        await worker.client.wait(2, 5000)  # replicas have it: what is lost is another test's
        await asyncio.to_thread(sentinels.fail_over)
        for offset in (1, 2):
            reply = await until_reached(lambda offset=offset: worker.token(claimed, offset))
            assert reply.offset == offset + 1
        await until_reached(lambda: worker.end(claimed, 3))
        seen += [event async for event in stream]
        assert [token for event in seen for token in event.token_ids] == [0, 1, 2]
        assert (await client.submit("after the fail-over")).created


async def test_sentinels_that_do_not_know_the_service_or_us_are_said(sentinels: Any) -> None:
    unknown = sentinels.url.replace("/primary/", "/secondary/")
    refused = sentinels.url.replace("sentinel_password=watch", "sentinel_password=guess")
    for url, said in ((unknown, "secondary"), (refused, "primary")):
        async with AsyncClient(url, "q") as client:
            with pytest.raises(ServerLost, match=said) as caught:
                await client.ping()
            assert "word" not in repr(client)
            assert "guess" not in f"{client!r}{caught.value}"
