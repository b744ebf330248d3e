"""Write a safetensors file tensor by tensor, so that only one tensor is in memory at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

_FLOAT32_BYTES = 4


def write_float32_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
    """Write `tensors`, which come in the order of `shapes`, as float32; synced to disk on return.

    Format: the header's length as uint64 (little endian), the header as JSON, the data. Raises
    `ValueError` when the tensors are not those that `shapes` announces.
    """
    header = _header(shapes)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        announced = iter(shapes.items())
        for name, values in tensors:
            if next(announced, None) != (name, values.shape):
                raise ValueError(f"tensor {name} of shape {values.shape} was not announced here")
            file.write(np.ascontiguousarray(values, dtype="<f4").data)
        if (missing := next(announced, None)) is not None:
            raise ValueError(f"tensor {missing[0]} is missing")
        file.flush()
        os.fsync(file.fileno())


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * _FLOAT32_BYTES
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The data starts at a multiple of 8 bytes; spaces after the JSON are part of the format.
    return text + b" " * (-len(text) % 8)
