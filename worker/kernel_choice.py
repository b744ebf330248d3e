"""Whether a worker is to compute with native kernels; known without torch."""

from __future__ import annotations

from inferq.kernels.native import mode
from inferq.protocol.errors import InvalidRequestError


def native_kernels() -> str:
    """Return auto, off or require; raise `InvalidRequestError` for another $INFERQ_NATIVE_KERNELS.

    The variable counts for `LLM` too, which has no settings.
    """
    try:
        return mode.native_mode()
    except ValueError as error:
        text = str(error).removeprefix(f"{mode.VARIABLE} ")
        raise InvalidRequestError(text, field=mode.VARIABLE) from None
