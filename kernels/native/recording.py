"""Work whose native calls are recorded once, and from then on repeated in one call.

What Python does between the kernels of a small step takes as long as a fifth of them. It does the
same each time: the calls' arguments are addresses and sizes. A recording keeps them, with memory of
its own in the place of what was allocated while it was made; what the work takes and leaves
elsewhere must stay where it is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from inferq.kernels.native.library import NativeCall, native_function, noted_calls

#: How an argument lies in a `Slot` of export.h, by its letter in signatures.
_SLOTS: Final = {"p": "Q", "l": "q", "i": "i4x", "f": "f4x"}
_SLOT_BYTES: Final = 8
#: That of torch's allocator, which kernels may rely on.
_ALIGNMENT: Final = 64

_ALLOCATIONS: Final = frozenset(
    (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty)
)


class CannotRecordError(Exception):
    """The work does what a recording would not repeat; the text says what."""


class WorkMemory:
    """Memory of recordings that are not repeated side by side: what one leaves another writes over.

    It is taken in doubling sizes; recordings made before keep what they have.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return at least so many bytes."""
        if size > self._bytes.nbytes:
            self._bytes = torch.empty(max(size, 2 * self._bytes.nbytes), dtype=torch.uint8)
        return self._bytes


class Recording:
    """Recorded work; repeating it writes `output` again."""

    def __init__(self, calls: list[NativeCall], memory: _Places, output: Tensor) -> None:
        repeat = native_function("inferq_repeat", "pl")
        if repeat is None or not calls:
            raise CannotRecordError("it makes no native calls")
        self._repeat = repeat
        self.output = memory.moved(output)
        self.output.copy_(output)
        #: The addresses in `_calls` and `_slots` point into it.
        self._memory = memory
        signatures = "".join(call.signature for call in calls)
        values = [
            memory.address(value) if letter == "p" else value
            for call in calls
            for letter, value in zip(call.signature, call.arguments, strict=True)
        ]
        layout = "=" + "".join(map(_SLOTS.__getitem__, signatures))
        self._slots = _bytes(struct.pack(layout, *values))
        sizes = (_SLOT_BYTES * len(call.signature) for call in calls)
        places = accumulate(sizes, initial=self._slots.data_ptr())
        numbers = [
            number
            for call, place in zip(calls, islice(places, len(calls)), strict=True)
            for number in (call.repeat, place)
        ]
        self._calls = _bytes(struct.pack(f"={len(numbers)}Q", *numbers))
        #: How many native calls it repeats.
        self.num_calls = len(calls)

    @classmethod
    def of(cls, work: Callable[[], Tensor], memory: WorkMemory | None = None) -> Recording:
        """Do the work and record it; raises `CannotRecordError` where it is not all native calls.

        Views and empty tensors may be made beside these. All that the work reads must stay alive.
        Without `memory` to share it gets some of its own.
        """
        calls: list[NativeCall] = []
        watch = _Watch()
        token = noted_calls.set(calls)
        try:
            with watch:
                output = work()
        finally:
            noted_calls.reset(token)
        return cls(calls, _Places(watch.allocated, memory or WorkMemory()), output)

    @property
    def nbytes(self) -> int:
        """Memory that it uses in the place of what the work allocated."""
        return self._memory.nbytes

    def repeat(self) -> Tensor:
        """Do the work again, on what now lies where its inputs lay; returns `output`."""
        self._repeat(self._calls.data_ptr(), self.num_calls)
        return self.output


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the addresses and sizes of what is allocated; refuses all other work of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated: list[tuple[int, int]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare torch's compiler, whose import takes more than a second: nothing here meets it."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in _ALLOCATIONS:
            if not made.is_cpu:
                raise CannotRecordError(f"{func} allocates on {made.device}")
            self.allocated.append((made.data_ptr(), made.untyped_storage().nbytes()))
        # What may give a view, such as `contiguous`, may have copied as well.
        elif not (func.is_view and _storages(made) <= _storages(args)):
            raise CannotRecordError(f"{func} is no native call")
        return made


def _bytes(content: bytes) -> Tensor:
    """Return them where they stay."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _storages(value: Any) -> set[int]:
    """Return the addresses of the tensors' memory."""
    return {
        leaf.untyped_storage().data_ptr() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)
    }


@dataclass(frozen=True, slots=True)
class _Region:
    """Addresses that were allocated, once or several times, and where they lie now."""

    first: int
    last: int
    offset: int


class _Places:
    """Where that now lies what was allocated.

    The allocator gives memory that was let go to what comes next, so the whole of a work's
    allocations takes little. Regions that overlap move together, and so does what they hold.
    """

    def __init__(self, allocated: Iterable[tuple[int, int]], memory: WorkMemory) -> None:
        self._regions: list[_Region] = []
        size = 0
        for first, last in _joined(allocated):
            offset = size + first % _ALIGNMENT
            self._regions.append(_Region(first, last, offset))
            size = -(-(offset + last - first) // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = size + _ALIGNMENT
        self._bytes = memory.take(self.nbytes)
        self._base = -(-self._bytes.data_ptr() // _ALIGNMENT) * _ALIGNMENT

    def address(self, address: int) -> int:
        """Return where a recorded address lies now: elsewhere only if it was allocated."""
        for region in self._regions:
            if region.first <= address < region.last:
                return self._base + region.offset + address - region.first
        return address

    def moved(self, tensor: Tensor) -> Tensor:
        """Return the tensor that lies in the place of one that was allocated."""
        first = self.address(tensor.data_ptr()) - self._bytes.data_ptr()
        if not 0 <= first <= self._bytes.nbytes - tensor.nbytes or not tensor.is_contiguous():
            raise CannotRecordError("the output is not one that the work has made")
        part = self._bytes[first : first + tensor.nbytes]
        return part.view(tensor.dtype).view(tensor.shape)


def _joined(allocated: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first and last addresses of regions, those that overlap as one."""
    joined: list[tuple[int, int]] = []
    for first, size in sorted(allocated):
        if size == 0:
            continue
        if joined and first < joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], first + size)
        else:
            joined.append((first, first + size))
    return joined
