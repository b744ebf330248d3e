"""What the runner needs of a model, whichever path computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from inferq.kernels.attention import AttentionBatch


class ModelShape(Protocol):
    """What is known of a model before it is loaded."""

    @property
    def architecture(self) -> str:
        """Name of the architecture in config.json."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the head; may be padded beyond the tokenizer's ids."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers, each of which has keys and values in the cache."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        ...

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Positions that the model was made for."""
        ...

    @property
    def longest_positions(self) -> int:
        """Positions to which its settings can be stretched."""
        ...

    @property
    def dtype(self) -> str | None:
        """The checkpoint's dtype, None where config.json is silent."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text."""
        ...


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """How a loaded model is computed, and what its weights take in this process."""

    path: Literal["native", "transformers"]
    #: The weights' own format, for people; None: they are plain.
    quantization: str | None
    weight_bytes: int
    dtype: torch.dtype
    attention: str
    #: The forms that its matrix products have, see docs/kernels.md.
    products: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a step computes, on the model's device.

    `token_ids` and `positions` [T] are int64; `rows` [R], int64, are those of the tokens whose
    hidden rows are wanted; `adapters` [T], int64, number the tokens' adapters, 0 for none; None
    where no token has one.
    """

    token_ids: Tensor
    positions: Tensor
    batch: AttentionBatch
    rows: Tensor
    adapters: Tensor | None = None


class CausalModel(Protocol):
    """A loaded decoder over the paged cache; see `Decoder`."""

    max_positions: int

    @property
    def description(self) -> ModelDescription:
        """How it is computed."""
        ...

    @property
    def config(self) -> ModelShape:
        """The model's sizes."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def hidden(self, step: StepTensors, kv_cache: Tensor) -> Tensor:
        """Compute a step but for the head, writing the cache; return `rows` [R, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of hidden rows [R, hidden_size]."""
        ...
