"""A queue of its own for each test, on each kind of server."""

from __future__ import annotations

import pytest
import redis.asyncio
from driven_queue import DrivenQueue


@pytest.fixture
def q(redis_client: redis.asyncio.Redis, queue: str) -> DrivenQueue:
    """A queue that no other test uses."""
    return DrivenQueue(redis_client, queue)
