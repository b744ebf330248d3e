"""A parser of commands that tells of an unknown flag where it stands, and which one is near."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """Refuses unknown arguments with its own usage, not with that of the command above it."""

    def parse_known_args(  # type: ignore[override]  # one form for its three overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Return the namespace and no further arguments: those end the program with an error."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0])}")
        return found, []

    def _hint(self, argument: str) -> str:
        if not argument.startswith("--"):
            return ""
        # without the dashes, which would make all flags look alike
        known = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
        close = difflib.get_close_matches(argument[2:].partition("=")[0], known, n=1)
        return f"; did you mean --{close[0]}?" if close else ""
