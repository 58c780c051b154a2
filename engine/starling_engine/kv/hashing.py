"""Prefix hashes of cached blocks: a chain of SHA-256 over granules of eight tokens.

A block's hash is the chain's value at its end, so it stands for the whole prefix. Blocks of 8, 16 and 32 tokens share one chain.
SHA-256 is safe against forged hits: nobody can make another prefix with the same hash.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

GRANULE = 8
HASH_BYTES = 32


def chain_root(*keys: str | None) -> bytes:
    """Returns the chain's first value, from what a prefix depends on apart from its tokens: adapter, cache salt."""
    return sha256(repr(keys).encode()).digest()


class HashChain:
    """The chain over a growing token sequence."""

    __slots__ = ("_at", "_head", "_stride", "hashes")

    def __init__(self, root: bytes, block_size: int) -> None:
        self._head = root
        self._stride = block_size // GRANULE
        self._at = 0
        self.hashes: list[bytes] = []
        """hashes[i] is the hash of logical block i, for every block that was full at `extend`."""

    @property
    def length(self) -> int:
        """Tokens of the hashed blocks."""
        return self._at

    def covers(self, count: int) -> bool:
        """Returns whether all blocks that are full within `count` tokens have hashes."""
        return count - self._at < self._stride * GRANULE

    def extend(self, tokens: Sequence[int], count: int) -> None:
        """Hashes the blocks that are full within the first `count` tokens."""
        packed = array("I", tokens[self._at : count - count % (self._stride * GRANULE)]).tobytes()
        head, width = self._head, 4 * GRANULE
        for number, start in enumerate(range(0, len(packed), width), 1):
            head = sha256(head + packed[start : start + width]).digest()
            if number % self._stride == 0:
                self.hashes.append(head)
        self._at += len(packed) // 4
        self._head = head
