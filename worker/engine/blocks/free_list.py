"""KV blocks and the intrusive list of the free ones."""

from __future__ import annotations

from collections.abc import Iterator

from inferq.worker.engine.blocks.prefix_chain import BlockLink


class Block:
    """One KV block: free when nothing references it, reusable while `link` names its content."""

    __slots__ = ("index", "link", "next", "previous", "references")

    def __init__(self, index: int) -> None:
        self.index = index
        self.references = 0
        self.link: BlockLink | None = None
        self.previous: Block = self
        self.next: Block = self


class FreeList:
    """A doubly linked list through the blocks themselves; every operation but iteration is O(1)."""

    __slots__ = ("_count", "_sentinel")

    def __init__(self) -> None:
        self._sentinel = Block(-1)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Block]:
        block = self._sentinel.next
        while block is not self._sentinel:
            yield block
            block = block.next

    def push_front(self, block: Block) -> None:
        """Make `block` the next to be taken."""
        self._insert(block, self._sentinel.next)

    def push_back(self, block: Block) -> None:
        """Make `block` the last to be taken."""
        self._insert(block, self._sentinel)

    def pop_front(self) -> Block:
        """Take the first block; raise `LookupError` when there is none."""
        block = self._sentinel.next
        if block is self._sentinel:
            raise LookupError("no free block")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Take `block`, wherever it stands."""
        block.previous.next = block.next
        block.next.previous = block.previous
        block.previous = block.next = block
        self._count -= 1

    def _insert(self, block: Block, successor: Block) -> None:
        block.previous, block.next = successor.previous, successor
        successor.previous.next = block
        successor.previous = block
        self._count += 1
