"""Figures that are read for metrics: seldom, within a time, and never old ones."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from inferq.protocol.errors import ServerLost
from inferq.runtime import figures
from inferq.runtime.figures import Figures


class Server:
    """Answers by name with how often it was asked, fails for those in `lost`, or hangs."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.lost: set[str] = set()
        self.hanging: set[str] = set()

    async def read(self, name: str) -> int:
        self.asked[name] += 1
        await asyncio.sleep(0)
        if name in self.lost:
            raise ServerLost("away")
        if name in self.hanging:
            await asyncio.Event().wait()
        return self.asked[name]


@pytest.fixture
def server() -> Server:
    return Server()


async def test_all_who_ask_together_share_one_reading(server: Server) -> None:
    read = Figures(("a", "b"), server.read)
    assert read.current == {}
    await asyncio.gather(*(read.refresh() for _ in range(50)))
    await read.refresh()
    assert read.current == {"a": 1, "b": 1}
    assert server.asked == {"a": 1, "b": 1}


async def test_what_cannot_be_read_is_gone_and_comes_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "STANDS_S", 0)
    read = Figures(("a", "b"), server.read)
    await read.refresh()
    server.lost = {"b"}
    await read.refresh()
    assert read.current == {"a": 2}
    server.lost = set()
    await read.refresh()
    assert read.current == {"a": 3, "b": 3}


async def test_a_server_that_hangs_costs_its_time_once_and_leaves_no_figures(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "TIMEOUT_S", 0.05)
    server.hanging = {"b"}
    read = Figures(("a", "b"), server.read)
    await read.refresh()
    await read.refresh()  # the failure stands for a while, too
    assert read.current == {"a": 1}
    assert server.asked == {"a": 1, "b": 1}
