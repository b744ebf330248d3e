"""Weights from safetensors files, copied straight to where the model wants them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from inferq.protocol.errors import ModelError
from inferq.worker.model.memory import format_bytes

_log = logging.getLogger(__name__)

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
#: Most names in one error message.
_MAX_NAMES: Final = 5


class WeightLoader(Protocol):
    """Whoever fills a decoder's parameters: `load_weights`, or something that makes them up."""

    def __call__(
        self, folder: Path, targets: Mapping[str, Tensor], *, is_ignored: Callable[[str], bool]
    ) -> None:
        """Fill every target from `folder`; see `load_weights`."""


def load_weights(
    folder: Path, targets: Mapping[str, Tensor], *, is_ignored: Callable[[str], bool]
) -> None:
    """Fill every target from the tensor of its name, converting the dtype on the way.

    Files are mapped into memory and copied tensor by tensor: no second copy of the weights is
    made. Raises `ModelError` naming tensors that are missing, misshapen, or neither wanted nor
    ignored, and files that are damaged.
    """
    started = time.monotonic()
    found: set[str] = set()
    unknown: list[str] = []
    for path in weight_files(folder):
        others = _load_file(path, targets, found)
        unknown += [name for name in others if not is_ignored(name)]
    if missing := sorted(set(targets) - found):
        raise ModelError(f"{folder} lacks {_names(missing)}")
    if unknown:
        raise ModelError(
            f"{folder} holds {_names(sorted(unknown))}, which this architecture does not use"
        )
    size = sum(target.nbytes for target in targets.values())
    _log.info("loaded %s of weights in %.1f s", format_bytes(size), time.monotonic() - started)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model: those of its index, or all that are there."""
    index = folder / _INDEX
    if index.is_file():
        return _indexed_files(index)
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    # Shards without an index. consolidated*.safetensors repeat the weights under other names.
    shards = sorted(folder.glob("model*.safetensors")) or [
        path
        for path in sorted(folder.glob("*.safetensors"))
        if not path.name.startswith(("consolidated", "adapter"))
    ]
    if shards:
        return shards
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} holds its weights as pickles ({_names(pickles)}), which can run code when "
            "loaded; only safetensors are read: convert them"
        )
    raise ModelError(f"{folder} has no safetensors files")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        files = sorted(index.parent / Path(name).name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error!r}") from None
    if absent := [path.name for path in files if not path.is_file()]:
        raise ModelError(f"{index.parent} lacks {_names(absent)}, which {index.name} names")
    return files


def _load_file(path: Path, targets: Mapping[str, Tensor], found: set[str]) -> list[str]:
    """Copy the wanted tensors of one file, add their names to `found`, return the other names."""
    unknown = []
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                target = targets.get(name)
                if target is None:
                    unknown.append(name)
                    continue
                if name in found:
                    raise ModelError(f"{path.name}: {name} stands in another file too")
                _check_tensor(path, name, file.get_slice(name), target)
                target.copy_(file.get_tensor(name))
                found.add(name)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or incomplete: {error}") from None
    return unknown


def _check_tensor(path: Path, name: str, stored: Any, target: Tensor) -> None:
    shape, expected = tuple(stored.get_shape()), tuple(target.shape)
    if shape != expected:
        raise ModelError(
            f"{path.name}: {name} has shape {list(shape)}; config.json asks for {list(expected)}"
        )
    if (dtype := stored.get_dtype()) not in _FLOATS:
        raise ModelError(f"{path.name}: {name} has dtype {dtype}; supported: {', '.join(_FLOATS)}")


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    more = len(names) - _MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
