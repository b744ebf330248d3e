"""What the ranks of a divided model do together: NCCL between GPUs, gloo on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from inferq.worker.model.ranks.parallel import Share

#: Seconds after which a rank that others wait for counts as lost.
COLLECTIVE_TIMEOUT_S: Final = 120.0
#: All ranks are on this machine.
LOOPBACK: Final = "127.0.0.1"


class Backend(Protocol):
    """What we use of torch's process groups; see `torch.distributed` for the functions."""

    def allreduce(self, tensors: list[Tensor]) -> Any:
        """Replace each by the sum."""

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        """Replace it by the root's."""

    def gather(self, output_tensors: list[Tensor], input_tensor: Tensor, root: int) -> Any:
        """Send `input_tensor` to the root's list."""

    def abort(self) -> None:
        """Give up all calls under way."""


class RankGroup:
    """One rank's side of the group; all ranks must make the same calls in the same order.

    On a GPU a call only puts work on the current stream. On the CPU it raises `RuntimeError` when
    another rank is gone, or does not come within `COLLECTIVE_TIMEOUT_S`.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._backend: Backend | None = None

    def connect(self, store: Store) -> None:
        """Find the other ranks; returns when all are there."""
        if self._device.type == "cuda":
            self._backend = _nccl(store, self.rank, self.size)
        else:
            self._backend = _gloo(store, self.rank, self.size)

    def add_up(self, x: Tensor) -> None:
        """Replace x by the sum of the ranks' x, which is the same on all of them."""
        self._connected.allreduce([x]).wait()

    def broadcast(self, x: Tensor) -> None:
        """Replace x by that of rank 0."""
        self._connected.broadcast(x, 0).wait()

    def join(self, x: Tensor) -> Tensor:
        """Return the ranks' x [T, N] side by side on rank 0, and x itself on the others."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._connected.gather(parts, x, 0).wait()
        return torch.cat(parts, dim=1) if parts else x

    def abort(self) -> None:
        """Let work on the GPU wait for the other ranks no longer; its results are void.

        For any thread. On the CPU calls end by themselves when a rank is gone.
        """
        backend, self._backend = self._backend, None
        if backend is not None and self._device.type == "cuda":
            backend.abort()

    @property
    def _connected(self) -> Backend:
        if self._backend is None:
            raise RuntimeError("the ranks are not connected yet")
        return self._backend


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """A rank's rows of the embedding and of the head."""

    group: RankGroup
    first: int
    rows: int
    vocab_size: int

    @classmethod
    def of(cls, share: Share, group: RankGroup) -> VocabularyPart:
        """Return the part that `share` holds."""
        rows = share.vocabulary_rows
        return cls(group, share.rank * rows, rows, share.model.vocab_size)

    def embed(self, token_ids: Tensor, rows_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return embeddings [T, hidden_size]; `rows_of` reads this rank's rows."""
        local = token_ids - self.first
        is_elsewhere = (local < 0) | (local >= self.rows)
        embedded = rows_of(local.masked_fill(is_elsewhere, 0))
        embedded = embedded.masked_fill(is_elsewhere[:, None], 0.0)
        self.group.add_up(embedded)
        return embedded

    def join(self, logits: Tensor) -> Tensor:
        """Return the logits [T, vocab_size] on rank 0, of each rank's [T, rows]."""
        return self.group.join(logits)[:, : self.vocab_size]


def _gloo(store: Store, rank: int, size: int) -> Backend:
    kind = distributed_c10d.ProcessGroupGloo
    options = kind._Options()  # type: ignore[attr-defined] # noqa: SLF001 - torch's own way
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)  # noqa: SLF001
    options._devices = [kind.create_device(hostname=LOOPBACK)]  # noqa: SLF001
    return cast("Backend", kind(store, rank, size, options))


def _nccl(store: Store, rank: int, size: int) -> Backend:
    # NCCL's ranks find each other by a socket, which need not be seen from outside.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    kind = distributed_c10d.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)  # noqa: SLF001
    return cast("Backend", kind(store, rank, size, options))
