"""How tasks that talk to a server are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

#: Seconds after which a task that should end is cancelled again.
CANCEL_AGAIN_S: Final = 0.1


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended, however often they miss it."""
    # again and again: wait_for in Python 3.11, which redis uses, may lose a cancel
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
