"""What sequences keep on the device from step to step, so that a decode step need not send it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: What a decode step sends of each sequence; see `DecodeInputs.columns`.
NUM_COLUMNS: Final = 5


@dataclass(frozen=True, slots=True)
class RowUpdates:
    """New contents of some rows [P], as host arrays."""

    rows: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    """[P, blocks]: the beginnings of the tables; what is behind them stays."""
    floats: NDArray[np.float32]
    """[3, P]: temperature, top_p and min_p."""
    integers: NDArray[np.int64]
    """[4, P]: top_k, seed, child and the adapter's number."""

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All of them."""
        return (self.rows, self.block_tables, self.floats, self.integers)


class DeviceRows:
    """Block tables and sampling parameters by row of `SequenceRows`; the last row is padding's."""

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self.padding_columns = padding_columns(num_rows)
        size = num_rows + 1
        self.block_tables = torch.zeros(size, max_blocks, dtype=torch.int32, device=device)
        self._floats = torch.zeros(3, size, dtype=torch.float32, device=device)
        # top_p 1 and the rest 0: the padding row is greedy, of the base model.
        self._floats[1] = 1
        self._integers = torch.zeros(4, size, dtype=torch.int64, device=device)

    def update(self, rows: Tensor, block_tables: Tensor, floats: Tensor, integers: Tensor) -> None:
        """Take `RowUpdates`, copied to the device."""
        self.block_tables[:, : block_tables.shape[1]].index_copy_(0, rows, block_tables)
        self._floats.index_copy_(1, rows, floats)
        self._integers.index_copy_(1, rows, integers)

    def parameters(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return temperature, top_k, top_p, min_p, seed and child [N] of rows [N]."""
        temperature, top_p, min_p = self._floats[:, rows]
        top_k, seed, child = self._integers[:3, rows]
        return temperature, top_k, top_p, min_p, seed, child

    def adapters(self, rows: Tensor) -> Tensor:
        """Return the number of the adapter of each of rows [N], 0 for none."""
        return self._integers[3, rows]


def padding_columns(num_rows: int) -> tuple[int, int, int, int, int]:
    """Return what a decode step sends in the place of a sequence, given the number of rows."""
    return num_rows, -1, 0, 0, 0
