"""How far loading is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Final, Self

from tqdm import tqdm

from inferq.worker.model.sizing.memory import format_bytes

_log = logging.getLogger(__name__)

#: Seconds between two lines of a log.
_LOG_INTERVAL_S: Final = 5.0


class LoadProgress:
    """Shows the share of `total` bytes that was added; a context manager."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._logged_at = time.monotonic()
        self._bar = tqdm(
            total=total,
            desc="loading weights",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            leave=False,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def add(self, count: int) -> None:
        """Say that `count` more bytes are there."""
        self._done += count
        self._bar.update(count)
        now = time.monotonic()
        if self._bar.disable and now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            share = 100 * self._done // max(self._total, 1)
            _log.info("loading weights: %d %% of %s", share, format_bytes(self._total))
