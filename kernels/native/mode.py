"""Whether native kernels are wanted: known without torch, so that a wrong choice shows at once."""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "INFERQ_NATIVE_KERNELS"
#: auto: use them where they can be built; off: never; require: fail where they cannot be built.
MODES: Final = ("auto", "off", "require")


def native_mode() -> str:
    """Return what $INFERQ_NATIVE_KERNELS asks for; auto where it is empty or not set.

    Raises `ValueError` for what is none of `MODES`.
    """
    mode = os.environ.get(VARIABLE) or "auto"
    if mode not in MODES:
        raise ValueError(f"{VARIABLE} is {mode!r}: choose {', '.join(MODES)}")
    return mode
