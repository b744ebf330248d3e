"""Weights from safetensors files, copied straight to where the model wants them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inferq.protocol.errors import ModelError
from inferq.worker.model.loading.load_progress import LoadProgress
from inferq.worker.model.loading.refusals import listed, refuse_pickles
from inferq.worker.model.ranks.parallel import Cut
from inferq.worker.model.sizing.memory import format_bytes, return_freed_memory

_log = logging.getLogger(__name__)

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_16_BIT: Final = {"F16": torch.float16, "BF16": torch.bfloat16}
#: Of packed words and of indices, which are copied as they are.
_INTEGERS: Final = ("I32",)


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Parameters that are filled together, and what fixes their layout once they are.

    `targets` is asked anew each time: nobody but the model holds a tensor that `finish` replaces.
    """

    targets: Callable[[], Mapping[str, Tensor]]
    finish: Callable[[], None]


class WeightLoader(Protocol):
    """Whoever fills a model's parameters: `load_weights`, or something that makes them up."""

    def __call__(
        self, folder: Path, groups: Sequence[WeightGroup], *, rename: Callable[[str], str | None]
    ) -> None:
        """Fill every target from `folder`, and finish each group; see `load_weights`."""


def load_weights(
    folder: Path,
    groups: Sequence[WeightGroup],
    *,
    rename: Callable[[str], str | None],
    cut: Callable[[str], Cut | None] = lambda _: None,
) -> None:
    """Fill every target from the tensor of its name, converting the dtype on the way.

    `rename` gives the target of a stored name, or None for a tensor that nobody reads; `cut` says
    of a target which part of the stored tensor it is, and no other part is read. Files are
    mapped into memory, and let go after each group: beside the weights there is one group's worth
    of pages. Raises `ModelError` naming tensors that are missing, misshapen, stored twice or not
    known, and files that are damaged, before anything is copied.
    """
    started = time.monotonic()
    stored = _stored_tensors(folder, groups, rename, cut)
    size = sum(target.nbytes for group in groups for target in group.targets().values())
    with LoadProgress(size) as progress:
        for group in groups:
            progress.add(_fill(group, stored))
            group.finish()
            return_freed_memory()
    _log.info("loaded %s of weights in %.1f s", format_bytes(size), time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a target's values lie."""

    path: Path
    name: str
    cut: Cut | None


def _stored_tensors(
    folder: Path,
    groups: Sequence[WeightGroup],
    rename: Callable[[str], str | None],
    cut: Callable[[str], Cut | None],
) -> dict[str, _Stored]:
    """Find every target's tensor; raise `ModelError` unless files and targets fit exactly."""
    targets = {name: target for group in groups for name, target in group.targets().items()}
    found: dict[str, _Stored] = {}
    unknown: list[str] = []
    for path in weight_files(folder):
        with _opened(path) as file:
            for stored_name in file.keys():  # noqa: SIM118 - not a mapping
                name = rename(stored_name)
                if name is None:
                    continue
                if name not in targets:
                    unknown.append(stored_name)
                    continue
                if name in found:
                    raise ModelError(f"{path.name}: {stored_name} stands in another file too")
                part = cut(name)
                target = targets[name]
                shape = target.shape if part is None else part.stored_shape(target.shape)
                _check_tensor(path, stored_name, file.get_slice(stored_name), shape)
                _check_dtype(path, stored_name, file.get_slice(stored_name), target)
                found[name] = _Stored(path, stored_name, part)
    if missing := sorted(set(targets) - set(found)):
        raise ModelError(f"{folder} lacks {listed(missing)}")
    if unknown:
        raise ModelError(
            f"{folder} holds {listed(sorted(unknown))}, which this architecture does not use"
        )
    return found


def _fill(group: WeightGroup, stored: Mapping[str, _Stored]) -> int:
    """Copy a group's tensors and return their bytes; a file is mapped, and its pages kept, for it.

    Pages of a file count as this process's memory while they are mapped.
    """
    targets = group.targets()
    for path in sorted({stored[name].path for name in targets}):
        with _opened(path) as file:
            for name, target in targets.items():
                if stored[name].path == path:
                    _read(file, stored[name], target)
    return sum(target.nbytes for target in targets.values())


def _read(file: Any, stored: _Stored, target: Tensor) -> None:
    if (cut := stored.cut) is None:
        target.copy_(file.get_tensor(stored.name))
        return
    source, filled = file.get_slice(stored.name), 0
    for start, stop in cut.ranges:
        if count := stop - start:
            index = (*[slice(None)] * cut.dim, slice(start, stop))
            target.narrow(cut.dim, filled, count).copy_(source[index])
            filled += count
    target.narrow(cut.dim, filled, target.shape[cut.dim] - filled).zero_()


def stored_16_bit_dtype(folder: Path, ends: tuple[str, ...]) -> torch.dtype | None:
    """Return the 16-bit dtype that all tensors have whose names end so, if there is one."""
    found = set()
    for path in weight_files(folder):
        with _opened(path) as file:
            names = [name for name in file.keys() if name.endswith(ends)]  # noqa: SIM118 - see above
            found |= {file.get_slice(name).get_dtype() for name in names}
    return _16_BIT.get(found.pop()) if len(found) == 1 else None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or incomplete: {error}") from None


def check_weight_files(folder: Path) -> int:
    """Return the bytes of a model's files; raise `ModelError` where one is missing or damaged.

    Only what the files say of themselves is read, so it is quick: a file that was cut off is found.
    """
    paths = weight_files(folder)
    for path in paths:
        with _opened(path) as file:
            file.keys()
    return sum(path.stat().st_size for path in paths)


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
    refuse_pickles(folder, "safetensors are")
    raise ModelError(
        f"{folder} has no safetensors files (pickles are not fetched from the hub: they can run "
        "code when loaded)"
    )


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        files = sorted(index.parent / Path(name).name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index: {error!r}") from None
    if absent := [path.name for path in files if not path.is_file()]:
        raise ModelError(f"{index.parent} lacks {listed(absent)}, which {index.name} names")
    return files


def _check_tensor(path: Path, name: str, stored: Any, expected: Sequence[int]) -> None:
    shape, expected = tuple(stored.get_shape()), tuple(expected)
    if shape != expected:
        raise ModelError(
            f"{path.name}: {name} has shape {list(shape)}; config.json asks for {list(expected)}"
        )


def _check_dtype(path: Path, name: str, stored: Any, target: Tensor) -> None:
    supported = _FLOATS if target.is_floating_point() else _INTEGERS
    if (dtype := stored.get_dtype()) not in supported:
        raise ModelError(
            f"{path.name}: {name} has dtype {dtype}; supported: {', '.join(supported)}"
        )
