"""What a worker answers to probes: whether it has started, advances, and takes jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from inferq.runtime.health import Check


class Advancing(Protocol):
    """The engine, as far as probes look at it."""

    @property
    def is_dead(self) -> bool:
        """Whether it has ended."""

    @property
    def stalled_s(self) -> float:
        """Seconds since it last advanced; 0 while it has nothing to do."""


class WorkerProbes:
    """The checks of one worker; `stop` is set once it drains."""

    def __init__(self, engine: Advancing, stop: asyncio.Event, *, step_timeout_s: float) -> None:
        self._engine = engine
        self._stop = stop
        self._step_timeout_s = step_timeout_s
        self._is_connected: Callable[[], bool] | None = None

    def loaded(self, is_connected: Callable[[], bool]) -> None:
        """Tell that the model is loaded and warm; `is_connected()` says whether claims succeed."""
        self._is_connected = is_connected

    @property
    def checks(self) -> dict[str, Check]:
        """The checks by path."""
        return {"/livez": self.live, "/readyz": self.ready, "/startupz": self.started}

    def live(self) -> str | None:
        """Say whether the process is beyond help: its engine is gone, or stands still."""
        if self._engine.is_dead:
            return "the engine has ended"
        if self._engine.stalled_s > self._step_timeout_s:
            return f"the engine has not advanced for {self._engine.stalled_s:.0f} s"
        return None

    def ready(self) -> str | None:
        """Say whether the worker takes jobs."""
        if self._stop.is_set():
            return "draining"
        if (why := self.started() or self.live()) is not None:
            return why
        assert self._is_connected is not None
        return None if self._is_connected() else "Redis does not take claims"

    def started(self) -> str | None:
        """Say whether the model is loaded."""
        return "the model is being loaded" if self._is_connected is None else None
