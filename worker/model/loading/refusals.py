"""What is said of files of weights that are not read: the model's own, and adapters'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from inferq.protocol.errors import ModelError

_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
#: Most names in one error message.
_MAX_NAMES: Final = 5


class PickledWeights(ModelError):
    """Weights in a form that can run code when it is loaded."""


def refuse_pickles(folder: Path, only: str, *, field: str = "model") -> None:
    """Raise `PickledWeights` for a folder that has some; `only` says what is read instead."""
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise PickledWeights(
            f"{folder} holds its weights as pickles ({listed(pickles)}), which can run code when "
            f"loaded; only {only} read: convert them",
            field=field,
        )


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(names[:_MAX_NAMES])
    more = len(names) - _MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
