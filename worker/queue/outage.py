"""What the log says while calls of one kind fail: a few lines an hour, however often they do."""

from __future__ import annotations

import time
from typing import Any, Final

#: Seconds of failure after which all jobs wait for it: an error, no warning any more.
LASTING_S: Final = 5.0
#: Seconds between two lines about failures that go on.
REMINDER_S: Final = 60.0


class Outage:
    """Tells of calls that fail at once, when it lasts, every minute then, and when it is over.

    `what` names the calls, as in "claim". The first failure is a warning, since a server that is
    replaced answers again in a second or two; those between two lines are at level debug.
    """

    def __init__(self, logger: Any, what: str) -> None:
        self._logger = logger
        self._what = what
        self._since: float | None = None
        self._due_at = 0.0

    def failed(self, error: Exception) -> None:
        """Take in a failure; whoever made the call tries again."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._due_at = now, now + LASTING_S
            self._logger.warning(f"{self._what} failed, will retry", error=str(error))
        elif now >= self._due_at:
            self._due_at = now + REMINDER_S
            self._logger.error(
                f"{self._what} still fails, will retry",
                error=str(error),
                for_s=round(now - self._since, 1),
            )
        else:
            self._logger.debug(f"{self._what} failed, will retry", error=str(error))

    def succeeded(self) -> None:
        """Take in a success."""
        if self._since is None:
            return
        since, self._since = self._since, None
        self._logger.info(
            f"{self._what} succeeds again", after_s=round(time.monotonic() - since, 1)
        )
