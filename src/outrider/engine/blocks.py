"""The paged KV cache's bookkeeping: which blocks are free, whose they are, and which prefixes they hold.

A block's content is named by a digest chain over the tokens from the start of the sequence, so two
sequences with the same prefix share its full blocks. A released block keeps its content until it is handed
out again, oldest first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for. The caller preempts, evicts or waits."""


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block: its tokens after everything that `parent` names."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class BlockPool:
    """Block ids 0..num_blocks-1, reference counted."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # oldest first
        self._references = [0] * num_blocks
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks of undefined content; `OutOfBlocks` takes none."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
            self._references[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back. A sequence's last blocks are reused before its first, which others may share."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None

    def shared_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Blocks that already hold a prefix of `tokens`, now referenced once more.

        At least one token is left over: its row is needed for logits.
        """
        found: list[int] = []
        if not self.prefix_caching:
            return found
        digest = b""
        for end in range(self.block_size, len(tokens), self.block_size):
            digest = chain_digest(digest, tokens[end - self.block_size : end])
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        for block in found:
            self._references[block] += 1
            self._free.pop(block, None)
        return found

    def publish(self, block: int, digest: bytes) -> None:
        """Say that a block, full of committed tokens, holds what `digest` names. First one wins."""
        if self.prefix_caching and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest
