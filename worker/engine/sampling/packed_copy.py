"""Several host arrays to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Where each array begins: enough for every type, and for wide loads.
_ALIGNMENT: Final = 16


class PackedCopy:
    """Copies arrays to a GPU through pinned memory, so that the host need not wait.

    There is memory for two copies: the third waits for the first. On the CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer, self._other = (torch.empty(0, dtype=torch.uint8) for _ in range(2))
        self._sent: torch.cuda.Event | None = None
        self._other_sent: torch.cuda.Event | None = None

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Return the arrays as tensors on the device, of the same types and shapes."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        starts, total = layout(arrays)
        host = self._take(total)
        pack(host.numpy(), arrays, starts)
        copied = host[:total].to(self._device, non_blocking=True)
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._sent.record(torch.cuda.current_stream(self._device))
        return views(copied, arrays, starts)

    def _take(self, size: int) -> Tensor:
        self._buffer, self._other = self._other, self._buffer
        self._sent, self._other_sent = self._other_sent, self._sent
        if self._sent is not None:
            self._sent.synchronize()
        if self._buffer.numel() < size:
            self._buffer = torch.empty(2 * size, dtype=torch.uint8, pin_memory=True)
        return self._buffer


def layout(arrays: Sequence[NDArray[Any]]) -> tuple[list[int], int]:
    """Return where each array begins in one buffer, in bytes, and how long that is."""
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts, total


def pack(buffer: NDArray[np.uint8], arrays: Sequence[NDArray[Any]], starts: list[int]) -> None:
    """Copy the arrays to their places."""
    for array, start in zip(arrays, starts, strict=True):
        place = buffer[start : start + array.nbytes].view(array.dtype)
        place.reshape(array.shape)[...] = array


def views(buffer: Tensor, arrays: Sequence[NDArray[Any]], starts: list[int]) -> list[Tensor]:
    """Return the places of the arrays in a byte buffer as tensors."""
    return [
        buffer[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]
