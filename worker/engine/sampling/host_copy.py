"""A tensor on its way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy that begins at once; nobody waits for it before `get`."""

    __slots__ = ("_arrived", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            # torch keeps freed pinned memory, so that a step costs no allocation by the driver.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor = host.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def get(self) -> Tensor:
        """Return the tensor in host memory, once it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor
