"""Open a GGUF file and read its metadata, with typed errors for what is not one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from inferq.protocol.errors import MissingExtraError, ModelError

if TYPE_CHECKING:
    from gguf import ReaderTensor

_MAGIC = b"GGUF"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file: its metadata by key, its tensors (memory-mapped, still quantized) by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, ReaderTensor]

    def get(self, key: str, kind: type[_T]) -> _T | None:
        """Return the metadata under `key`, or None; raise `ModelError` when it is no `kind`."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.path}: {key} is no {kind.__name__}: {value!r:.80}")
        return value

    def require(self, key: str, kind: type[_T]) -> _T:
        """Return the metadata under `key`; raise `ModelError` when it is missing."""
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.path}: the metadata lacks {key}")
        return value


def open_gguf(path: Path) -> GgufFile:
    """Open `path`; raise `ModelError` when it is missing, truncated or no GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    if magic != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r}, not {_MAGIC!r}")
    reader_class = _reader_class()
    try:
        reader = reader_class(path)
        metadata = {name: _contents(field) for name, field in reader.fields.items()}
    except (ValueError, LookupError, OverflowError, struct.error, MemoryError) as error:
        raise ModelError(
            f"{path} is truncated, damaged or of a newer GGUF version: {error}"
        ) from None
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def _reader_class() -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingExtraError("gguf", "gguf") from None
    return GGUFReader


def _contents(field: Any) -> Any:
    value = field.contents()
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
