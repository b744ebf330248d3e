"""What a check found: how it stands, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

#: What can be looked at, each with a heading of its own.
AREAS: Final = ("settings", "redis", "rights", "queue", "machine", "device", "model")
#: Names of several areas at once.
GROUPS: Final = MappingProxyType({"worker": ("device", "model")})
#: Where a worker can run.
DEVICES: Final = ("auto", "cpu", "cuda")


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    #: It works, and something about it will hurt.
    WARNING = "warning"
    #: It does not work.
    FAILURE = "failure"
    #: It could not be looked at: an extra, a right or an earlier check is missing.
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check; a warning and a failure have advice. Nothing in it is secret."""

    area: str
    check: str
    status: Status
    message: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Area:
    """Makes the findings of one area."""

    name: str

    def ok(self, check: str, message: str) -> Finding:
        """Tell that all is well."""
        return Finding(self.name, check, Status.OK, message)

    def warning(self, check: str, message: str, advice: str) -> Finding:
        """Tell what will hurt."""
        return Finding(self.name, check, Status.WARNING, message, advice)

    def failure(self, check: str, message: str, advice: str) -> Finding:
        """Tell what does not work."""
        return Finding(self.name, check, Status.FAILURE, message, advice)

    def skipped(self, check: str, message: str) -> Finding:
        """Tell why there was no look."""
        return Finding(self.name, check, Status.SKIPPED, message)
