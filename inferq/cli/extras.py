"""Commands whose parts may not be installed load them here, when called."""

from __future__ import annotations

import importlib
from typing import Any

from inferq.protocol.errors import MissingExtraError


def load_extra(module: str, *, extra: str) -> Any:
    """Import a module of ours; raise `MissingExtraError` when something it needs is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if missing.split(".")[0] == "inferq":
            raise
        raise MissingExtraError(extra, missing) from error
