"""A client of one streamed completion that costs little: what is measured is the gateway."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request

HOST = "127.0.0.1"
MODEL = "stand-in"


class HttpStream:
    """One streamed completion of so many tokens, with the times at which they came."""

    def __init__(self, port: int, tokens: int) -> None:
        self.job_id = ""
        self.has_begun = asyncio.Event()
        #: On the monotonic clock, by token.
        self.times: list[float] = []
        self._port = port
        self._tokens = tokens
        self._has_finished = False
        self._is_done = False

    @property
    def is_complete(self) -> bool:
        """Whether all tokens came, then a finish reason, then the end."""
        return len(self.times) == self._tokens and self._has_finished and self._is_done

    async def follow(self) -> None:
        """Ask, and read to the end."""
        reader, writer = await asyncio.open_connection(HOST, self._port)
        try:
            writer.write(self._request())
            await self._read_head(reader)
            await self.read_events(reader)
        finally:
            self.has_begun.set()
            writer.close()
            await writer.wait_closed()

    def _request(self) -> bytes:
        body = json.dumps(
            {
                "model": MODEL,
                "prompt": [5] * 32,
                "max_tokens": self._tokens,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def _read_head(self, reader: asyncio.StreamReader) -> None:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {await reader.read(4096)!r}")
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            if name.lower() == "x-inferq-job-id":
                self.job_id = value.strip()
        self.has_begun.set()

    async def read_events(self, reader: asyncio.StreamReader) -> None:
        """Read what follows the head."""
        # an event is never cut by a chunk of the transfer encoding, whose lines are passed over
        total = 0
        while line := await reader.readline():
            if line.startswith(b"id: "):
                total = int(line[4:].partition(b"-")[0])
            elif line.startswith(b"data: "):
                self.times += [time.monotonic()] * (total - len(self.times))
                self._has_finished |= b'"finish_reason":"length"' in line
                self._is_done |= b"[DONE]" in line


def is_healthy(port: int) -> bool:
    """Whether the gateway has a worker to serve a request now."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
