"""The event loop's end of the pipe to the engine process.

Reads in the loop itself: a thread that reads for it costs a switch, and a fight for the
interpreter, for every step. The other end is a `multiprocessing.connection.Connection`, whose
framing this is: a signed 32-bit length, or -1 and a 64-bit one, big-endian, before each message.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Final

from inferq.worker.pipe.frames import pack, unpack

_SHORT: Final = struct.Struct("!i")
_LONG: Final = struct.Struct("!iQ")
_LONGEST_SHORT: Final = 0x7FFFFFFF


class FramePipe(asyncio.Protocol):
    """Sends frames without ever waiting, and calls `on_frame` with each that comes.

    `on_lost` is called once, when the other end is gone, `on_frame` raised, or after `close`.
    """

    def __init__(
        self, on_frame: Callable[[list[Any]], None], on_lost: Callable[[Exception | None], None]
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()

    def send(self, frame: list[Any]) -> None:
        """Send a frame; what a stuck engine does not read waits in memory."""
        data = pack(frame)
        header = (
            _SHORT.pack(len(data)) if len(data) <= _LONGEST_SHORT else _LONG.pack(-1, len(data))
        )
        assert self._transport is not None
        self._transport.write(header + data)

    def close(self) -> None:
        """Close this end at once; what was not sent is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; called by the loop."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take the frames that are complete; called by the loop."""
        received = self._received
        received += data
        start = 0
        while (bounds := _frame_at(received, start)) is not None:
            begin, start = bounds
            self._on_frame(unpack(bytes(received[begin:start])))
        del received[:start]

    def connection_lost(self, error: Exception | None) -> None:
        """End; called by the loop."""
        self._on_lost(error)


def _frame_at(received: bytearray, start: int) -> tuple[int, int] | None:
    """Return begin and end of the frame whose header is at `start`, if all of it is there."""
    begin = start + _SHORT.size
    if len(received) < begin:
        return None
    (length,) = _SHORT.unpack_from(received, start)
    if length < 0:
        begin = start + _LONG.size
        if len(received) < begin:
            return None
        _, length = _LONG.unpack_from(received, start)
    return (begin, begin + length) if len(received) >= begin + length else None
