"""A TCP proxy before the server that loses replies, delays and cuts connections on demand."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress


class FaultyProxy:
    """Forwards to a port of this machine; what goes wrong is set by its attributes."""

    def __init__(self, upstream_port: int, chance: random.Random) -> None:
        self.upstream_port = upstream_port
        #: Longest delay of a chunk in either direction, in seconds.
        self.delay_s = 0.0
        #: Replies still to be lost: the command has reached the server, and the connection dies.
        self.replies_to_lose = 0
        self._is_cut = False
        self._chance = chance
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def cut(self) -> None:
        """Let nobody through, and end the connections there are."""
        self._is_cut = True
        self.drop_connections()

    def heal(self) -> None:
        self._is_cut = False
        self.delay_s = 0.0
        self.replies_to_lose = 0

    def drop_connections(self) -> None:
        for writer in list(self._connections):
            writer.transport.abort()

    async def aclose(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections.add(writer)
        upstream = None
        try:
            if self._is_cut:
                return
            up_reader, upstream = await asyncio.open_connection("127.0.0.1", self.upstream_port)
            self._connections.add(upstream)
            pumps = [
                asyncio.create_task(self._pump(reader, upstream, replies=False)),
                asyncio.create_task(self._pump(up_reader, writer, replies=True)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # the server is away: so is the client's connection
        finally:
            for end in (writer, upstream):
                if end is not None:
                    self._connections.discard(end)
                    end.transport.abort()
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool
    ) -> None:
        with suppress(OSError):
            while chunk := await reader.read(1 << 16):
                if self.delay_s:
                    await asyncio.sleep(self._chance.uniform(0, self.delay_s))
                if replies and self.replies_to_lose > 0:
                    self.replies_to_lose -= 1
                    return
                writer.write(chunk)
                await writer.drain()
