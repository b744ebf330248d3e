"""The event loop's end of the pipe: frames whole and in order, however the bytes come."""

from __future__ import annotations

import asyncio
import socket
from multiprocessing.connection import Connection
from typing import Any

import pytest

from inferq.worker.pipe import frame_pipe
from inferq.worker.pipe.frame_pipe import FramePipe
from inferq.worker.pipe.frames import pack, unpack


class End:
    """Our end, with what came and how it ended."""

    def __init__(self) -> None:
        self.frames: list[list[Any]] = []
        self.came = asyncio.Event()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.pipe = FramePipe(self._take, self.lost.set_result)

    async def open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().create_connection(lambda: self.pipe, sock=ours)
        return theirs

    async def received(self, count: int) -> list[list[Any]]:
        async with asyncio.timeout(10):
            while len(self.frames) < count:
                self.came.clear()
                await self.came.wait()
        return self.frames

    def _take(self, frame: list[Any]) -> None:
        self.frames.append(frame)
        self.came.set()


async def test_frames_of_a_multiprocessing_connection_arrive_in_order() -> None:
    end = End()
    theirs = Connection((await end.open()).detach())
    frames = [["steps", n, "x" * n, {}] for n in (0, 1, 1000, 300_000)]
    for frame in frames:
        await asyncio.to_thread(theirs.send_bytes, pack(frame))
    assert await end.received(4) == frames
    end.pipe.close()
    theirs.close()


async def test_frames_cut_anywhere_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    end = End()
    theirs = await end.open()
    monkeypatch.setattr(frame_pipe, "_LONGEST_SHORT", 10)  # the second has the long header
    first, second = ["a", 1], ["b", "x" * 50]
    pipe = FramePipe(lambda frame: None, lambda error: None)
    written = bytearray()
    pipe.connection_made(_Sink(written))
    pipe.send(first)
    pipe.send(second)
    for byte in bytes(written):
        theirs.send(bytes([byte]))
        await asyncio.sleep(0)
    assert await end.received(2) == [first, second]
    end.pipe.close()
    theirs.close()


async def test_what_we_send_a_multiprocessing_connection_reads() -> None:
    end = End()
    theirs = Connection((await end.open()).detach())
    frame = ["add", "x" * 500_000]
    end.pipe.send(frame)
    assert unpack(await asyncio.to_thread(theirs.recv_bytes)) == frame
    end.pipe.close()
    theirs.close()


async def test_the_loss_of_the_other_end_is_told_once() -> None:
    end = End()
    (await end.open()).close()
    assert await asyncio.wait_for(end.lost, 10) is None


async def test_a_frame_that_cannot_be_taken_ends_the_pipe() -> None:
    def refuse(frame: list[Any]) -> None:
        raise LookupError(frame[0])

    lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: None)
    ours, theirs = socket.socketpair()
    await loop.create_connection(lambda: FramePipe(refuse, lost.set_result), sock=ours)
    await asyncio.to_thread(Connection(theirs.detach()).send_bytes, pack(["steps"]))
    error = await asyncio.wait_for(lost, 10)
    assert isinstance(error, LookupError)


class _Sink(asyncio.Transport):
    """Takes what is written."""

    def __init__(self, written: bytearray) -> None:
        super().__init__()
        self._written = written

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._written += data
