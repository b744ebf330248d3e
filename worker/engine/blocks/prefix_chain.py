"""The hash chain over the full blocks of a token list, by which equal prefixes are found."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple


class BlockLink(NamedTuple):
    """One full block's place in a chain: `digest` is SHA-256 over `content`.

    `content` is the parent's digest followed by the block's token ids (int32), so that whoever
    holds a block can verify a match and need not trust the digest alone.
    """

    digest: bytes
    content: bytes


class PrefixChain:
    """The links of one token list's full blocks, extended as the list grows.

    Chains of different salts, or of different adapters, have no digest in common.
    """

    __slots__ = ("_block_size", "_root", "links")

    def __init__(self, block_size: int, salt: str = "", adapter: str = "") -> None:
        self._block_size = block_size
        self._root = sha256(sha256(salt.encode()).digest() + adapter.encode()).digest()
        self.links: list[BlockLink] = []

    def copy(self) -> PrefixChain:
        """Return a chain that holds the same links and grows on its own."""
        chain = copy.copy(self)
        chain.links = self.links.copy()
        return chain

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Add the links up to `num_blocks`, all of whose tokens `token_ids` must hold."""
        links, size = self.links, self._block_size
        parent = links[-1].digest if links else self._root
        for start in range(len(links) * size, num_blocks * size, size):
            content = parent + array("i", token_ids[start : start + size]).tobytes()
            parent = sha256(content).digest()
            links.append(BlockLink(parent, content))
