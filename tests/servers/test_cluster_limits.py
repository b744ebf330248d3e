"""The limits of API keys on a Cluster: on one node, whichever the queue is on."""

from __future__ import annotations

from typing import Any

import pytest

from inferq.producer import AsyncClient
from inferq.producer.gateway.admission.access import Access, KeyLimits
from inferq.producer.gateway.admission.limits import Limiter
from inferq.producer.gateway.errors import HttpError


async def test_gateways_of_queues_on_different_nodes_count_together(
    cluster: Any, queue: str
) -> None:
    access = Access(queue, KeyLimits(max_concurrency=1, tokens_per_minute=100))
    async with (
        AsyncClient(cluster.url, f"{queue}-a") as first,
        AsyncClient(cluster.url, f"{queue}-b") as second,
    ):
        async with await Limiter(first).admit(access, tokens=10) as admission:
            admission.used_tokens = 1
            with pytest.raises(HttpError, match="1 jobs at once"):
                await Limiter(second).admit(access)
        async with await Limiter(second).admit(access, tokens=90) as admission:
            assert admission.headers["x-ratelimit-limit-tokens"] == "100"
