"""What a model takes and what fits beside it: one block of the log at the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inferq.worker.model.architecture.causal_model import CausalModel
from inferq.worker.model.running.kv_cache import KVCacheShape
from inferq.worker.model.sizing.memory import format_bytes


@dataclass(frozen=True, slots=True)
class StartTable:
    """A log message: lines for people as text, and the same facts as fields of a JSON line.

    With several ranks, sizes are those of each.
    """

    model: CausalModel
    folder: Path
    ranks: int
    kv_shape: KVCacheShape
    num_blocks: int
    num_swap_blocks: int

    @property
    def log_fields(self) -> Mapping[str, Any]:
        """The facts by name; sizes in bytes."""
        made = self.model.description
        return {
            "event": "the model is loaded",
            "architecture": self.model.config.architecture,
            "path": made.path,
            "folder": str(self.folder),
            "quantization": made.quantization,
            "weight_bytes": made.weight_bytes,
            "dtype": _name(made.dtype),
            "device": str(self.model.device),
            "ranks": self.ranks,
            "kv_blocks": self.num_blocks,
            "block_size": self.kv_shape.block_size,
            "kv_bytes": self._bytes(self.num_blocks),
            "kv_dtype": _name(self.kv_shape.dtype),
            "swap_blocks": self.num_swap_blocks,
            "swap_bytes": self._bytes(self.num_swap_blocks),
            "max_model_len": self.model.max_positions,
            "requests_that_fit": round(self._requests, 1),
            "attention": made.attention,
            "products": list(made.products),
        }

    def __str__(self) -> str:
        made = self.model.description
        kind = f", {made.quantization}" if made.quantization else ""
        each = f", on each of {self.ranks} ranks" if self.ranks > 1 else ""
        length = self.model.max_positions
        swap = f"{self._blocks(self.num_swap_blocks)} of host memory"
        rows = {
            "weights": f"{format_bytes(made.weight_bytes)}{kind}{each}",
            "computed": f"in {_name(made.dtype)} on {self.model.device}",
            "KV pool": f"{self._blocks(self.num_blocks)} in {_name(self.kv_shape.dtype)}",
            "swap space": swap if self.num_swap_blocks else "none",
            "room for": f"{self._requests:.1f} requests of max_model_len {length}",
            "attention": made.attention,
            "products": ", ".join(made.products),
        }
        title = f"{self.model.config.architecture} ({made.path}) from {self.folder}"
        return "\n".join([title, *(f"  {name:<12}{value}" for name, value in rows.items())])

    @property
    def _requests(self) -> float:
        return self.num_blocks / self.kv_shape.blocks_for(self.model.max_positions)

    def _bytes(self, blocks: int) -> int:
        return blocks * self.kv_shape.block_bytes

    def _blocks(self, count: int) -> str:
        size = format_bytes(self._bytes(count))
        return f"{count} blocks of {self.kv_shape.block_size} tokens ({size})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
