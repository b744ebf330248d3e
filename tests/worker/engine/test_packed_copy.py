"""Arrays of all types and shapes in one buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferq.worker.engine.sampling.host_copy import HostCopy
from inferq.worker.engine.sampling.packed_copy import PackedCopy, layout, pack, views

ARRAYS = [
    np.arange(5, dtype=np.int64) - 2,
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.zeros(0, dtype=np.float32),
    np.array([1.5, -0.0], dtype=np.float32),
    np.zeros((0, 4), dtype=np.int32),
    np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2],
]


def test_arrays_come_out_of_one_buffer_as_they_went_in() -> None:
    starts, total = layout(ARRAYS)
    assert all(start % 16 == 0 for start in starts)
    buffer = np.full(total, 0xAA, dtype=np.uint8)
    pack(buffer, ARRAYS, starts)
    for array, tensor in zip(ARRAYS, views(torch.from_numpy(buffer), ARRAYS, starts), strict=True):
        assert tensor.dtype == torch.from_numpy(array.copy()).dtype
        assert tuple(tensor.shape) == array.shape
        assert tensor.tolist() == array.tolist()


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_on_the_cpu_nothing_is_copied(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype=np.int64)
    (tensor,) = PackedCopy(torch.device("cpu")).send([array])
    array.fill(7)
    assert tensor.flatten().tolist() == [7] * array.size
    assert HostCopy(tensor).get() is tensor
