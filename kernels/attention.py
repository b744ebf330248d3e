"""Paged attention: what a step hands to it, what a backend offers, and the choice of backend."""

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inferq.kernels.native.library import load_native

_log = logging.getLogger(__name__)

HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's ragged batch: the tokens of all sequences concatenated to T rows.

    Sequences with one query token ("decodes") come first. S is the number of sequences.
    """

    query_starts: Tensor
    """int32 [S + 1] on the device: first row of each sequence, then T."""
    seq_lens: Tensor
    """int32 [S] on the device: tokens in the cache after this step's write. 0: a padding row."""
    block_tables: Tensor
    """int32 [S, max_blocks] on the device, padded with any valid block."""
    slot_mapping: Tensor
    """int64 [T] on the device: block * block_size + offset of each token; -1 is not written."""
    num_decodes: int
    query_lens: tuple[int, ...]
    """Host copy, so that no backend reads back from the device."""
    context_lens: tuple[int, ...]
    """Host copy of seq_len - query_len: tokens that were in the cache before this step."""
    block_size: int
    max_seq_len: int | None = None
    """Bound of seq_lens for as long as the plan is used; None: the longest of this step.

    Set it where the device tensors change in place under a captured graph: then nothing that a
    backend derives for decodes depends on context_lens.
    """

    def __post_init__(self) -> None:
        sequences = len(self.query_lens)
        if len(self.context_lens) != sequences or self.seq_lens.numel() != sequences:
            raise ValueError(
                f"query_lens, context_lens and seq_lens disagree: {sequences}, "
                f"{len(self.context_lens)}, {self.seq_lens.numel()} sequences"
            )
        if self.query_starts.numel() != sequences + 1 or self.block_tables.shape[0] != sequences:
            raise ValueError(
                f"query_starts {tuple(self.query_starts.shape)} and block_tables "
                f"{tuple(self.block_tables.shape)} do not fit {sequences} sequences"
            )
        if any(length != 1 for length in self.query_lens[: self.num_decodes]):
            raise ValueError(f"the first {self.num_decodes} sequences must have one query token")
        if self.max_seq_len is None:
            return
        if self.max_seq_len > self.block_tables.shape[1] * self.block_size:
            raise ValueError(
                f"max_seq_len {self.max_seq_len} does not fit block_tables "
                f"{tuple(self.block_tables.shape)} with blocks of {self.block_size}"
            )
        if self.max_seq_len < max(self.total_lens, default=0):
            raise ValueError(
                f"max_seq_len is {self.max_seq_len}, but a sequence has {max(self.total_lens)}"
            )

    @property
    def total_lens(self) -> tuple[int, ...]:
        """Give each sequence's tokens in the cache after this step; 0 for a padding row."""
        return tuple(
            max(context + query, 0)
            for context, query in zip(self.context_lens, self.query_lens, strict=True)
        )


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What a backend derived from one step's batch; opaque to the caller, used for all layers."""

    batch: AttentionBatch


class AttentionOps(Protocol):
    """Write to and attend over a paged cache; stateless, one for each kind of device.

    A `kv_layer` is one layer's view [blocks, 2, block_size, kv_heads, head_dim] of the cache
    [blocks, layers, 2, block_size, kv_heads, head_dim]: its strides are honoured.
    """

    @property
    def name(self) -> str:
        """Give the form's name: "triton", "native", "torch" or "reference"."""
        ...

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Derive once per step what every layer's calls need."""
        ...

    def write_kv(self, key: Tensor, value: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> None:
        """Store key and value [T, kv_heads, head_dim] at the batch's slots; slot -1 is skipped."""
        ...

    def attend(
        self,
        query: Tensor,
        kv_layer: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Attend causally from query [T, heads, head_dim] to the cache; returns the same shape.

        A token sees the last `window` tokens including itself. Scores are capped with
        soft_cap * tanh(score / soft_cap). The step's keys must have been written before.
        """
        ...

    def describe(self) -> str:
        """Say in one line which form this is, for logs."""
        ...


def attention_ops(device: torch.device, name: str | None = None) -> AttentionOps:
    """Choose the form for a device, or the named one; ValueError if it cannot run there.

    "cpu" is "native" where that can be compiled, else "torch".
    """
    chosen = name or ("triton" if device.type == "cuda" else "cpu")
    ops = _load(chosen, device)
    _log.debug("attention on %s: %s", device, ops.describe())
    return ops


def check_shapes(query: Tensor, kv_layer: Tensor, batch: AttentionBatch) -> None:
    """Raise ValueError for heads, head size or block size that do not fit together."""
    heads, head_dim = query.shape[1], query.shape[2]
    block_size, kv_heads = kv_layer.shape[2], kv_layer.shape[3]
    if kv_layer.shape[4] != head_dim:
        raise ValueError(f"head_dim is {head_dim} in the query, {kv_layer.shape[4]} in the cache")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    if block_size != batch.block_size:
        raise ValueError(
            f"block_size is {batch.block_size} in the batch, {block_size} in the cache"
        )


def _load(name: str, device: torch.device) -> AttentionOps:
    # Imported here: a form is loaded only where it is used, and Triton may be absent.
    if name == "reference":
        from inferq.kernels.reference import ReferenceAttention

        return ReferenceAttention()
    if name in {"cpu", "native", "torch"}:
        if device.type != "cpu":
            raise ValueError(f"attention form {name!r} cannot run on {device}")
        return _load_cpu(name)
    if name == "triton":
        try:
            from inferq.kernels.triton_attention import TritonAttention
        except ImportError as error:
            raise ValueError(
                "attention form 'triton' cannot run: triton is not installed"
            ) from error
        return TritonAttention(device)
    forms = "'triton', 'cpu' ('native' or 'torch'), or 'reference'"
    raise ValueError(f"attention form {name!r} is unknown: choose {forms}")


def _load_cpu(name: str) -> AttentionOps:
    library = None if name == "torch" else load_native()
    if library is not None:
        from inferq.kernels.cpu_attention_native import NativeAttention

        return NativeAttention(library)
    if name == "native":
        raise ValueError("attention form 'native' cannot run: the native kernels are not available")
    from inferq.kernels.cpu_attention import CpuAttention

    return CpuAttention()
