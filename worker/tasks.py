"""What a worker does at the same time: its parts, and how their tasks end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from inferq.protocol.task_ends import end_tasks

Result = TypeVar("Result")


class PartEnded(Exception):
    """A part has ended that nobody asked to; `fault` is what it raised, if anything."""

    def __init__(self, part: str, fault: BaseException | None) -> None:
        super().__init__(f"{part} ended: {fault!r}")
        self.part = part
        self.fault = fault


class Parts:
    """The parts that run until they are told to end; the end of any other one is a fault."""

    def __init__(self) -> None:
        self._parts: dict[str, asyncio.Task[None]] = {}
        self._told: set[str] = set()

    def start(self, name: str, part: Coroutine[Any, Any, None]) -> None:
        """Begin to run a part."""
        self._parts[name] = asyncio.create_task(part, name=name)

    async def ended(self, name: str, timeout_s: float | None = None) -> None:
        """Wait for the end of a part that was told to end, or until the time is over."""
        self._told.add(name)
        await asyncio.wait([self._parts[name]], timeout=timeout_s)

    async def beside(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return what `work` returns; cancel it, and raise `PartEnded`, if a part ends first."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                running = [part for name, part in self._parts.items() if not self._is_over(name)]
                await asyncio.wait([task, *running], return_when=asyncio.FIRST_COMPLETED)
            return task.result()
        finally:
            await end_tasks([task])

    async def cancel(self, but: str | None = None) -> None:
        """End all parts, except perhaps one."""
        await end_tasks(part for name, part in self._parts.items() if name != but)

    def _is_over(self, name: str) -> bool:
        """Whether a part has ended as it was told to; raise `PartEnded` for any other end."""
        part = self._parts[name]
        if not part.done():
            return False
        fault = asyncio.CancelledError() if part.cancelled() else part.exception()
        if name not in self._told or fault is not None:
            raise PartEnded(name, fault)
        return True
